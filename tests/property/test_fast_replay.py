"""The fast replay gives the results of the exact one, on random small clusters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.simulation.conftest import BLOCK, chats, cluster

from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.result import ReplayResult
from dynamo.operations.replay.workers import ReplayWorkers

AMPLE_BLOCKS = 4_000


def both(
    workers: ReplayWorkers, mode: str, seed: int, answer: int
) -> tuple[ReplayResult, ReplayResult]:
    plan = ReplayPlan("synthetic", workers, RouterSettings(mode=mode), BLOCK, 0)
    exact, _ = Replay(plan).run(chats(20, seed=seed, answer=answer))
    fast, _ = FastReplay(plan).run(chats(20, seed=seed, answer=answer))
    return exact, fast


def make_workers(count: int, blocks: int, seqs: int, eviction: str) -> ReplayWorkers:
    workers = replace(cluster(count), eviction=eviction)
    engine = replace(workers.groups[0].engine, num_blocks=blocks, max_num_seqs=seqs)
    return replace(workers, groups=[replace(workers.groups[0], engine=engine)])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(1, 200),
    workers=st.integers(1, 4),
    seqs=st.integers(1, 8),
    mode=st.sampled_from(["round_robin", "least_loaded", "kv"]),
)
def test_times_are_equal_where_nothing_is_evicted(
    seed: int, answer: int, workers: int, seqs: int, mode: str
) -> None:
    exact, fast = both(make_workers(workers, AMPLE_BLOCKS, seqs, "reuse"), mode, seed, answer)
    assert fast.completed == exact.completed
    near = 0.05 if mode == "kv" else 1e-4  # a timer that rounds otherwise may change an order
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, rel=near)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert getattr(fast, name).mean == pytest.approx(getattr(exact, name).mean, rel=near)
    if mode != "kv":
        assert fast.requests_per_worker == exact.requests_per_worker
        assert fast.itl_ms.p99 == pytest.approx(exact.itl_ms.p99, rel=0.01)


def test_the_fast_replay_says_what_it_does_not_simulate() -> None:
    workers = replace(cluster(2), ranks=2)
    with pytest.raises(ConfigError, match="data-parallel ranks") as caught:
        FastReplay(ReplayPlan("synthetic", workers, RouterSettings(mode="adaptive")))
    assert "adaptive" in str(caught.value)
    assert caught.value.hint == "omit --fast"


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
    assert fast.reuse_first_admission == pytest.approx(exact.reuse_first_admission, abs=0.05)
    assert fast.e2e_ms.mean == pytest.approx(exact.e2e_ms.mean, rel=0.1)
