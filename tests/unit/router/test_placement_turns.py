"""When to look again, who is settled with, and what a threshold leaves to the choice of a worker."""

from __future__ import annotations

import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.scheduling.router.costs.predicted import TtftCost
from dynamo.scheduling.router.placement.solver import HoldLimits

HASHES = list(range(1, 1_001))


def test_every_prompt_that_went_is_settled_with_once() -> None:
    cluster = FakeCluster(1)
    computed, left = cluster.submit(100, HASHES[:6]), cluster.submit(100, HASHES[:6])
    placed = cluster.place()
    assert cluster.view.open_prefills == 2
    cluster.solver.on_first_token(placed[computed.id], cluster.now)
    assert cluster.view.open_prefills == 1
    cluster.solver.on_ended(placed[computed.id], cluster.now)
    assert cluster.view.open_prefills == 1
    cluster.solver.on_ended(placed[left.id], cluster.now)
    assert cluster.view.open_prefills == 0


def test_whoever_is_told_that_there_is_no_worker_waits_no_more() -> None:
    cluster = FakeCluster(2)
    barred, kept = cluster.submit(100, excluded=frozenset("ab")), cluster.submit(100)
    assert cluster.solver.pop_unplaceable() == [barred]
    assert len(cluster.solver) == 1
    assert cluster.solver.pop_unplaceable() == []
    cluster.worker_states.update_instances({})
    assert cluster.place() == {}
    assert cluster.solver.pop_unplaceable() == [kept]
    assert len(cluster.solver) == 0


def test_it_is_looked_again_when_a_worker_is_nearly_free_and_then_it_goes() -> None:
    cluster = FakeCluster(2, hold_limits=HoldLimits(max_backlog_s=0.05))
    cluster.add_prefill("a", 20_000)
    cluster.add_prefill("b", 8_000)
    arrival = cluster.submit(100)
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due == pytest.approx(cluster.worker_states["b"].prefill_free_s - 0.05)
    cluster.now = due + 1e-9
    assert cluster.place()[arrival.id].worker.name == "b"


def test_or_when_patience_ends_and_then_it_goes() -> None:
    cluster = FakeCluster(1, hold_limits=HoldLimits(max_hold_s=0.25))
    cluster.add_prefill("a", 100_000)
    arrival = cluster.submit(100)
    assert cluster.place() == {}
    cluster.now += 0.1
    due = cluster.solver.next_run_s(cluster.now)
    assert due == arrival.arrived_s + 0.25
    cluster.now = due
    assert arrival.id in cluster.place()
    assert cluster.solver.next_run_s(cluster.now) is None


def test_what_is_due_already_is_looked_at_soon_and_not_at_once() -> None:
    cluster = FakeCluster(1)
    arrival = cluster.submit(100, excluded=frozenset("a"))
    cluster.now += 100
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due is not None
    assert cluster.now < due < cluster.now + 1.0
    assert cluster.solver.pop_unplaceable() == [arrival]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_who_has_much_to_gain_waits_for_its_worker_below_the_threshold_too(
    threshold: float,
) -> None:
    cluster = FakeCluster(2, threshold=threshold)
    cluster.view.caches["a"] = set(HASHES)
    busy = cluster.add_prefill("a", 6_000)
    arrival = cluster.submit(16_016, HASHES)
    assert cluster.place() == {}
    cluster.solver.on_first_token(busy, cluster.now)
    assert cluster.place()[arrival.id].worker.name == "a"


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_burst_of_strangers_spreads(threshold: float) -> None:
    cluster = FakeCluster(4, TtftCost(), threshold=threshold)
    for _ in range(4):
        cluster.submit(900)
    assert len(cluster.place()) == 4
    assert sorted(cluster.view.routes) == ["a", "b", "c", "d"]


def test_all_that_have_waited_go_in_one_round_when_there_is_room() -> None:
    cluster = FakeCluster(1)
    busy = cluster.add_prefill("a", 8_000)
    waiting = [cluster.submit(20) for _ in range(60)]
    assert cluster.place() == {}
    cluster.solver.on_first_token(busy, cluster.now)
    assert cluster.place().keys() == {one.id for one in waiting}
