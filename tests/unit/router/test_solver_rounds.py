"""Rounds of the solver: the time of the next one, ends of prefills, and the busy threshold."""

from __future__ import annotations

import math

import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.scheduling.router.costs.interface import REGRET_WINDOW
from dynamo.scheduling.router.costs.predicted import TtftCost
from dynamo.scheduling.router.placement.candidates import HoldLimits

HASHES = list(range(1, 1_001))


def test_the_prefill_of_every_placed_prompt_ends_once() -> None:
    cluster = FakeCluster(1)
    computed, left = cluster.submit(100, HASHES[:6]), cluster.submit(100, HASHES[:6])
    placed = cluster.place()
    assert cluster.view.open_prefills == 2
    cluster.first_token(placed[computed.id])
    assert cluster.view.open_prefills == 1
    cluster.end(placed[computed.id])
    assert cluster.view.open_prefills == 1
    cluster.end(placed[left.id])
    assert cluster.view.open_prefills == 0


def test_unplaceable_requests_are_removed_once() -> None:
    cluster = FakeCluster(2)
    unplaceable, placeable = cluster.submit(100, excluded=frozenset("ab")), cluster.submit(100)
    assert cluster.solver.pop_unplaceable() == [unplaceable]
    assert len(cluster.solver) == 1
    assert cluster.solver.pop_unplaceable() == []
    cluster.worker_states.update_instances({})
    assert cluster.place() == {}
    assert cluster.solver.pop_unplaceable() == [placeable]
    assert len(cluster.solver) == 0


def test_the_next_round_is_due_when_a_worker_is_nearly_free() -> None:
    cluster = FakeCluster(2, hold_limits=HoldLimits(max_backlog_s=0.05))
    cluster.add_prefill("a", 20_000)
    cluster.add_prefill("b", 8_000)
    request = cluster.submit(100)
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due == pytest.approx(cluster.worker_states["b"].prefill_free_s - 0.05)
    cluster.now = due + 1e-9
    assert cluster.place()[request.id].worker.name == "b"


def test_the_next_round_is_due_when_the_hold_ends() -> None:
    cluster = FakeCluster(1, hold_limits=HoldLimits(max_hold_s=0.25))
    cluster.add_prefill("a", 100_000)
    request = cluster.submit(100)
    assert cluster.place() == {}
    cluster.now += 0.1
    due = cluster.solver.next_run_s(cluster.now)
    assert due == request.arrived_s + 0.25
    cluster.now = due
    assert request.id in cluster.place()
    assert cluster.solver.next_run_s(cluster.now) is None


def test_an_overdue_request_without_a_worker_is_rechecked_soon_but_not_at_once() -> None:
    cluster = FakeCluster(1)
    request = cluster.submit(100, excluded=frozenset("a"))
    cluster.now += 100
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due is not None
    assert cluster.now < due < cluster.now + 1.0
    assert cluster.solver.pop_unplaceable() == [request]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_request_is_held_for_its_cached_prefix_below_the_threshold_too(
    threshold: float,
) -> None:
    cluster = FakeCluster(2, threshold=threshold)
    cluster.view.caches["a"] = set(HASHES)
    busy = cluster.add_prefill("a", 6_000)
    request = cluster.submit(16_016, HASHES)
    assert cluster.place() == {}
    cluster.first_token(busy)
    assert cluster.place()[request.id].worker.name == "a"


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_burst_of_unrelated_prompts_spreads(threshold: float) -> None:
    cluster = FakeCluster(4, TtftCost(), threshold=threshold)
    for _ in range(4):
        cluster.submit(900)
    assert len(cluster.place()) == 4
    assert sorted(cluster.view.routes) == ["a", "b", "c", "d"]


def test_all_held_requests_are_placed_in_one_round_when_there_is_room() -> None:
    cluster = FakeCluster(1)
    busy = cluster.add_prefill("a", 8_000)
    waiting = [cluster.submit(20) for _ in range(60)]
    assert cluster.place() == {}
    cluster.first_token(busy)
    assert cluster.place().keys() == {request.id for request in waiting}


def test_a_round_is_cut_into_slices_that_need_no_event() -> None:
    cluster = FakeCluster(4)
    requests = {cluster.submit(20).id for _ in range(40)}
    placed: list[str] = []
    slices = 0
    while slices == 0 or cluster.solver.unfinished:
        slices += 1
        results = cluster.solver.place(cluster.now)
        placed += [result.request.id for result in results]
        assert len(results) <= REGRET_WINDOW
    assert set(placed) == requests
    assert slices == math.ceil(40 / REGRET_WINDOW)


def test_requests_may_leave_and_arrive_between_two_slices() -> None:
    cluster = FakeCluster(2)
    requests = [cluster.submit(20 + number) for number in range(30)]
    first = {result.request.id for result in cluster.solver.place(cluster.now)}
    assert cluster.solver.unfinished
    left = next(request for request in requests if request.id not in first)
    cluster.solver.cancel(left)
    late = cluster.submit(20)
    rest = cluster.place().keys()
    assert first | rest == {request.id for request in requests} - {left.id}
    assert cluster.place().keys() == {late.id}


def test_workers_may_leave_between_two_slices() -> None:
    cluster = FakeCluster(2)
    remaining = cluster.worker_states["b"].instance
    for number in range(40):
        cluster.submit(20 + number)
    cluster.solver.place(cluster.now)
    cluster.worker_states.update_instances({"b": remaining})
    assert {placed.worker.name for placed in cluster.place().values()} == {"b"}
    for number in range(40):
        cluster.submit(20 + number)
    cluster.solver.place(cluster.now)
    cluster.worker_states.update_instances({})
    assert cluster.place() == {}
    assert not cluster.solver.unfinished
    assert len(cluster.solver.pop_unplaceable()) == 28
