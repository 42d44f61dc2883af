"""Workers of a fast replay start, drain, die and change roles: no request is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.property.test_fast_replay import make_workers, with_roles
from tests.simulation.conftest import BLOCK, chats
from tests.support.invariants import check_ledger

from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.operations.replay.events import FleetEvent
from dynamo.operations.replay.fast.choosers import SolverChooser
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.fleet import Startup
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.result import ReplayResult
from dynamo.operations.replay.workers import ReplayWorkers, SimulatedTier

ERRORS = {"no_workers", "worker_failed", "poisoned_request", "overloaded"}
TIERS = [SimulatedTier("host", 100, 1e9), SimulatedTier("shared", 300, 5e8)]
times = st.floats(0, 25)


def changes(*kinds: str) -> st.SearchStrategy[Sequence[FleetEvent]]:
    return st.lists(
        st.builds(
            FleetEvent,
            times,
            st.sampled_from(["start", "drain", "die"]),
            st.sampled_from(kinds),
            startup=st.sampled_from([None, 0.0, 4.0]),
            restart=st.booleans(),
        ),
        max_size=8,
    )


def check(
    workers: ReplayWorkers, router: RouterSettings, seed: int, events: Sequence[FleetEvent]
) -> ReplayResult:
    load = chats(25, seed=seed, per_s=2.0, answer=100)
    plan = ReplayPlan(
        "synthetic", workers, router, BLOCK, seed, startup=Startup(1.0, 3.0), events=events,
        admission=bool(router.max_worker_requests),
    )  # fmt: skip
    replay = FastReplay(plan)
    result, log = replay.run(load)
    assert result.completed + sum(result.errors.values()) == result.requests
    assert set(result.errors) <= ERRORS
    turns = {turn.row: turn for each in load for turn in each.requests}
    assert [turns[row].output_tokens for row in log.rows] == list(log.tokens)
    assert len(set(log.rows)) == result.completed
    for worker in replay.fleet.workers:
        machine = replay.fleet.machines.get(str(worker.number))
        if machine is not None and worker.serves:
            assert not machine.load
            assert machine.cache.available == workers.groups[0].engine.num_blocks
    assert not replay.fleet.draining
    assert not replay.fleet.pulled
    if isinstance(replay.fleet.chooser, SolverChooser):
        assert not replay.fleet.chooser.waiting
        ledger = replay.fleet.chooser.solver.ledger
        assert not ledger.requests
        check_ledger(ledger)
    return result


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    workers=st.integers(1, 4),
    blocks=st.sampled_from([300, 4_000]),
    mode=st.sampled_from(["round_robin", "least_loaded", "kv"]),
    limit=st.sampled_from([0, 2]),
    events=changes("worker"),
    tiers=st.sampled_from([(), TIERS]),
)
@example(  # a request moves to the worker that was full when it was admitted
    seed=119, workers=1, blocks=300, mode="kv", limit=2, tiers=(),
    events=[
        FleetEvent(0.0, "die", "worker", startup=4.0),
        FleetEvent(4.0, "start", "worker", startup=4.0),
        FleetEvent(6.7168223899811395, "drain", "worker"),
        FleetEvent(10.0, "die", "worker"),
        FleetEvent(14.320654222349823, "die", "worker"),
        FleetEvent(14.72559494409325, "start", "worker"),
        FleetEvent(16.0, "start", "worker", startup=4.0),
        FleetEvent(21.981615070809777, "die", "worker"),
    ],
)  # fmt: skip
def test_no_request_is_lost(
    seed: int, workers: int, blocks: int, mode: str, limit: int,
    events: Sequence[FleetEvent], tiers: Sequence[SimulatedTier],
) -> None:  # fmt: skip
    router = RouterSettings(mode=mode, max_worker_requests=limit if mode == "kv" else 0)
    cluster = replace(make_workers(workers, blocks, 8, "lru"), tiers=tiers)
    check(cluster, router, seed, events)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    rate=st.sampled_from([5e8, 6.4e10]),
    tiers=st.sampled_from([(), TIERS]),
    events=changes("prefill-worker", "decode-worker"),
    roles=st.lists(
        st.builds(
            FleetEvent,
            times,
            st.just("role"),
            worker=st.integers(0, 1),
            role=st.sampled_from(["prefill", "decode", "both"]),
        ),
        max_size=4,
    ),
)
def test_no_prompt_of_another_worker_is_lost(
    seed: int, prefill: int, decode: int, rate: float, tiers: Sequence[SimulatedTier],
    events: Sequence[FleetEvent], roles: Sequence[FleetEvent],
) -> None:  # fmt: skip
    workers = replace(with_roles(prefill, decode, 300), transfer=rate, tiers=tiers)
    router = RouterSettings(mode="kv", disaggregation=DisaggregationSettings(mode="predicted"))
    check(workers, router, seed, [*events, *roles])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    workers=st.integers(2, 4),
    mode=st.sampled_from(["round_robin", "least_loaded", "kv"]),
    prefill=st.booleans(),
    events=changes("worker", "prefill-worker", "decode-worker"),
)
def test_both_replays_change_their_workers_alike(
    seed: int, workers: int, mode: str, prefill: bool, events: Sequence[FleetEvent]
) -> None:
    """The first worker of a kind stays: without any worker, random pauses decide much."""
    router, cluster = RouterSettings(mode=mode), make_workers(workers, 4_000, 8, "lru")
    if prefill:
        router = RouterSettings(mode="kv", disaggregation=DisaggregationSettings(mode="always"))
        cluster = replace(with_roles(workers, workers, 4_000), transfer=6.4e10)
    kinds = [group.kind for group in cluster.groups]
    leaving = dict.fromkeys(kinds, 0)
    script = []
    for event in sorted(events, key=lambda event: event.time):
        if event.kind in kinds:
            leaving[event.kind] += event.action != "start"
            if event.action == "start" or leaving[event.kind] < workers:
                script.append(event)
    plan = ReplayPlan("synthetic", cluster, router, BLOCK, seed, events=script)
    exact, _ = Replay(plan).run(chats(25, seed=seed, per_s=2.0, answer=100))
    fast, _ = FastReplay(plan).run(chats(25, seed=seed, per_s=2.0, answer=100))
    assert fast.completed == exact.completed == fast.requests
    near = 0.1 if mode == "kv" or prefill else 0.02
    assert fast.moved_requests == pytest.approx(exact.moved_requests, abs=2)
    assert fast.gpu_hours == pytest.approx(exact.gpu_hours, rel=near)
    assert fast.e2e_ms.mean == pytest.approx(exact.e2e_ms.mean, rel=near)
    assert fast.itl_ms.mean == pytest.approx(exact.itl_ms.mean, rel=near)
