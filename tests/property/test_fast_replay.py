"""The fast replay gives the results of the exact one, on random small clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.simulation.conftest import BLOCK, chats, cluster, unique

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import Tier
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.result import ReplayResult
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayWorkers, SimulatedTier

AMPLE_BLOCKS = 4_000


def both(
    workers: ReplayWorkers, mode: str, seed: int, answer: int, flexible: bool = False
) -> tuple[ReplayResult, ReplayResult]:
    roles = DisaggregationSettings(mode="flexible" if flexible else "always")
    router = RouterSettings(mode=mode, disaggregation=roles)
    plan = ReplayPlan("synthetic", workers, router, BLOCK, 0)
    exact, _ = Replay(plan).run(chats(20, seed=seed, answer=answer))
    fast, _ = FastReplay(plan).run(chats(20, seed=seed, answer=answer))
    return exact, fast


def make_workers(count: int, blocks: int, seqs: int, eviction: str) -> ReplayWorkers:
    workers = replace(cluster(count), eviction=eviction)
    engine = replace(workers.groups[0].engine, num_blocks=blocks, max_num_seqs=seqs)
    return replace(workers, groups=[replace(workers.groups[0], engine=engine)])


def with_roles(prefill: int, decode: int, blocks: int) -> ReplayWorkers:
    """Return workers that compute prompts and workers that decode; without `prefill`, others."""
    workers = make_workers(decode, blocks, 8, "lru")
    (group,) = workers.groups
    parts = ((prefill, ("prefill",)), (decode, ("decode",)))
    if not prefill:
        return workers
    groups = [
        replace(group, count=count, engine=replace(group.engine, roles=roles))
        for count, roles in parts
    ]
    return replace(workers, groups=groups)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(1, 200),
    workers=st.integers(1, 4),
    seqs=st.integers(1, 8),
    ranks=st.integers(1, 3),
    mode=st.sampled_from(["round_robin", "least_loaded", "power_of_two", "adaptive", "kv"]),
)
def test_times_are_equal_where_nothing_is_evicted(
    seed: int, answer: int, workers: int, seqs: int, ranks: int, mode: str
) -> None:
    cluster = replace(make_workers(workers, AMPLE_BLOCKS, seqs, "reuse"), ranks=ranks)
    exact, fast = both(cluster, mode, seed, answer)
    assert fast.completed == exact.completed
    predicts = mode in ("kv", "adaptive")
    near = 0.05 if predicts else 1e-4  # a timer that rounds otherwise may change an order
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, rel=near)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert getattr(fast, name).mean == pytest.approx(getattr(exact, name).mean, rel=near)
    if not predicts:
        assert fast.requests_per_worker == exact.requests_per_worker
        assert fast.itl_ms.p99 == pytest.approx(exact.itl_ms.p99, rel=0.01)


def test_the_fast_replay_says_what_it_does_not_simulate() -> None:
    with pytest.raises(ConfigError, match="router mode mine") as caught:
        FastReplay(ReplayPlan("synthetic", cluster(2), RouterSettings(mode="mine")))
    assert caught.value.hint == "omit --fast"


def test_ranks_in_lockstep_wait_for_the_slowest() -> None:
    """The long prompt at the second rank stretches a gap of the answer at the first one."""
    load = [
        TraceConversation(0.0, [TraceRequest(0, 640, 100)]),
        TraceConversation(0.2, [TraceRequest(1, 2_000, 10)]),
    ]
    results = []
    for lockstep in (False, True):
        workers = replace(cluster(1), ranks=2, lockstep=lockstep)
        plan = ReplayPlan("synthetic", workers, RouterSettings(), BLOCK)
        results.append(FastReplay(plan).run(load)[0])
    apart, together = results
    prefill_ms = apart.ttft_ms.max
    assert apart.requests_per_worker == together.requests_per_worker == [1, 1]
    assert apart.itl_ms.max < 10 < 0.9 * prefill_ms < together.itl_ms.max
    assert together.itl_ms.max == pytest.approx(prefill_ms, rel=0.01)
    assert prefill_ms < together.ttft_ms.max < prefill_ms + apart.itl_ms.max + 0.01
    with pytest.raises(ConfigError, match="lockstep"):
        Replay(plan).run(load)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 3),
    blocks=st.sampled_from([300, AMPLE_BLOCKS]),
    mode=st.sampled_from(["round_robin", "kv"]),
)
def test_lockstep_makes_no_answer_faster(seed: int, ranks: int, blocks: int, mode: str) -> None:
    workers = replace(make_workers(2, blocks, 8, "lru"), ranks=ranks)
    plan = ReplayPlan("synthetic", workers, RouterSettings(mode=mode), BLOCK)
    apart, _ = FastReplay(plan).run(chats(20, seed=seed))
    plan = replace(plan, workers=replace(workers, lockstep=True))
    together, _ = FastReplay(plan).run(chats(20, seed=seed))
    assert together.completed == apart.completed == apart.requests
    assert together.tpot_ms.mean > (0.999 if ranks == 1 else 0.98) * apart.tpot_ms.mean
    if ranks == 1:
        assert together.e2e_ms == apart.e2e_ms


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(1, 200),
    workers=st.integers(1, 4),
    blocks=st.integers(100, 400),
    mode=st.sampled_from(["round_robin", "least_loaded", "kv"]),
    eviction=st.sampled_from(["lru", "reuse"]),
)
def test_times_are_near_where_blocks_are_evicted(
    seed: int, answer: int, workers: int, blocks: int, mode: str, eviction: str
) -> None:
    exact, fast = both(make_workers(workers, blocks, 8, eviction), mode, seed, answer)
    assert fast.completed == exact.completed == fast.requests
    near = 0.1 if mode == "kv" else 0.05  # a choice that differs changes what is evicted
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, abs=near)
    assert fast.e2e_ms.mean == pytest.approx(exact.e2e_ms.mean, rel=0.1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(1, 100),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    blocks=st.sampled_from([300, AMPLE_BLOCKS]),
    rate=st.sampled_from([5e8, 6.4e10, math.inf]),
    ranks=st.integers(1, 2),
    mode=st.sampled_from(["kv", "kv", "round_robin", "least_loaded"]),
)
def test_prompts_that_other_workers_compute_take_as_long(
    seed: int,
    answer: int,
    prefill: int,
    decode: int,
    blocks: int,
    rate: float,
    ranks: int,
    mode: str,
) -> None:
    """Without `prefill` workers, each one is flexible."""
    workers = replace(with_roles(prefill, decode, blocks), transfer=rate, ranks=ranks)
    mode = mode if prefill else "kv"
    exact, fast = both(workers, mode, seed, answer, flexible=not prefill)
    assert fast.completed == exact.completed == fast.requests
    near = 0.05 if blocks == AMPLE_BLOCKS else 0.15
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, abs=near)
    assert fast.prefills.remote == pytest.approx(exact.prefills.remote, rel=near, abs=3)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(fast, name).mean == pytest.approx(getattr(exact, name).mean, rel=near)


TIERS: tuple[tuple[Tier, ...], ...] = (
    ("host",),
    ("disk",),
    ("shared",),
    ("host", "disk"),
    ("host", "disk", "shared"),
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.sampled_from([1, 20, 100, 200]),
    names=st.sampled_from(TIERS),
    rate=st.sampled_from([2e9, 1e10, 1e11]),
    sizes=st.lists(st.sampled_from([50, 300, 3_000]), min_size=3, max_size=3),
    prefill=st.integers(0, 2),
    decode=st.integers(1, 3),
    blocks=st.sampled_from([150, 300]),
    ranks=st.integers(1, 2),
    mode=st.sampled_from(["kv", "kv", "round_robin", "least_loaded"]),
    moves=st.booleans(),
)
def test_tiers_supply_as_much(
    seed: int,
    answer: int,
    names: Sequence[Tier],
    rate: float,
    sizes: list[int],
    prefill: int,
    decode: int,
    blocks: int,
    ranks: int,
    mode: str,
    moves: bool,
) -> None:
    """Without `prefill` workers, each one is flexible if KV `moves` between them."""
    tiers = [SimulatedTier(name, size, rate) for name, size in zip(names, sizes, strict=False)]
    transfer = 6.4e10 if prefill or moves else None
    workers = with_roles(prefill, decode, blocks)
    workers = replace(workers, tiers=tiers, transfer=transfer, ranks=ranks)
    mode = "kv" if moves and not prefill else mode
    exact, fast = both(workers, mode, seed, answer, flexible=moves and not prefill)
    assert fast.completed == exact.completed == fast.requests
    near = 0.15 if mode == "kv" else 0.05  # a choice that differs changes what is evicted
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, abs=near)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(fast, name).mean == pytest.approx(getattr(exact, name).mean, rel=0.15)
    assert fast.tiers.keys() == exact.tiers.keys()
    loads = [sum(tier.loaded_blocks for tier in each.tiers.values()) for each in (fast, exact)]
    assert loads[0] == pytest.approx(loads[1], rel=0.3, abs=60)


@settings(max_examples=15, deadline=None)
@given(
    prefill=st.integers(1, 6),
    decode=st.integers(1, 2),
    share=st.floats(0.5, 1.2),
    answer=st.sampled_from([1, 20, 150]),
    mode=st.sampled_from(["kv", "round_robin"]),
    named=st.booleans(),
)
def test_busy_prefill_workers_of_their_own_speed_take_as_long(
    prefill: int, decode: int, share: float, answer: int, mode: str, named: bool
) -> None:
    """Prompts come at a `share` of what the workers bear. None has a block that others find: they
    are not `named`, or equal where nothing is cached."""
    workers = with_roles(prefill, decode, AMPLE_BLOCKS)
    ahead, answering = workers.groups
    ahead = replace(ahead, timing=Timing(c0=10.0, c1=0.08, c2=0.0, c3=2e-5, c4=1e-8))
    answering = replace(answering, timing=Timing(c0=15.0, c1=0.05, c2=0.1, c3=2e-5, c4=1e-8))
    parts = [ahead, answering]
    workers = replace(workers, groups=parts, transfer=2e11, prefix_caching=not named)
    router = RouterSettings(mode=mode, disaggregation=DisaggregationSettings(mode="always"))
    plan = ReplayPlan("synthetic", workers, router, BLOCK, 0)
    names = tuple(range(1, 41)) if named else ()
    load = [
        replace(each, requests=[replace(each.requests[0], block_ids=names)])
        for each in unique(60, per_s=share * prefill / 0.23, answer=answer)
    ]
    exact, _ = Replay(plan).run(load)
    fast, _ = FastReplay(plan).run(load)
    assert fast.prefills == exact.prefills
    assert fast.completed == fast.prefills.remote == fast.requests
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(fast, name).mean == pytest.approx(getattr(exact, name).mean, rel=0.05)


def test_pairs_of_a_large_fleet_are_those_of_the_router() -> None:
    workers = replace(with_roles(100, 100, 100), transfer=6.4e10)
    exact, fast = both(workers, "kv", 1, 20, flexible=False)
    assert fast.prefills == exact.prefills
    assert fast.prefills.remote == fast.requests
    assert fast.ttft_ms.mean == pytest.approx(exact.ttft_ms.mean, rel=1e-3)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    workers=st.integers(1, 3),
    limits=st.sampled_from(
        [{"ttft_slo": 0.5}, {"max_queue_wait": 1.0}, {"max_worker_requests": 2}]
    ),
    mode=st.sampled_from(["kv", "round_robin", "adaptive"]),
)
def test_admission_rejects_as_many(
    seed: int, workers: int, limits: dict[str, float], mode: str
) -> None:
    router = RouterSettings(mode=mode, **limits)  # type: ignore[arg-type]
    cluster = make_workers(workers, AMPLE_BLOCKS, 3, "lru")
    plan = ReplayPlan("synthetic", cluster, router, BLOCK, 0, admission=True)
    rejected, ttft, ended = [0, 0], [0.0, 0.0], [0, 0]
    for each in range(seed, seed + 4):
        load = chats(40, seed=each, per_s=20.0 * workers, answer=60)
        for which, replay in enumerate((Replay, FastReplay)):
            result, _ = replay(plan).run(load)
            ended[which] += result.completed + result.rejected
            rejected[which] += result.rejected
            ttft[which] += result.ttft_ms.mean
    assert ended[0] == ended[1]
    assert rejected[1] == pytest.approx(rejected[0], rel=0.1, abs=4)
    assert ttft[1] == pytest.approx(ttft[0], rel=0.1)


@pytest.mark.parametrize(("seed", "workers", "target_ms"), [(2, 2, 8.0), (0, 3, 12.0), (1, 4, 8.0)])
def test_a_target_of_gaps_steers_alike(seed: int, workers: int, target_ms: float) -> None:
    """No random clusters here: a single slow gap may change where many prompts are computed."""
    roles = DisaggregationSettings(mode="flexible", itl_slo=target_ms)
    router = RouterSettings(mode="kv", disaggregation=roles)
    cluster = replace(make_workers(workers, AMPLE_BLOCKS, 8, "lru"), transfer=6.4e10)
    plan = ReplayPlan("synthetic", cluster, router, BLOCK, 0)
    load = chats(60, seed=seed, per_s=4.0, answer=100)
    exact, _ = Replay(plan).run(load)
    fast, _ = FastReplay(plan).run(load)
    assert fast.completed == exact.completed == fast.requests
    assert fast.prefills.remote == pytest.approx(exact.prefills.remote, rel=0.1)
    assert fast.e2e_ms.mean == pytest.approx(exact.e2e_ms.mean, rel=0.03)
    assert fast.itl_ms.mean == pytest.approx(exact.itl_ms.mean, rel=0.02)
