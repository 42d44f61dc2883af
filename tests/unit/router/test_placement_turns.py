"""When to look again, who is settled with, and what a threshold leaves to the choice of a worker."""

from __future__ import annotations

import pytest
from tests.unit.router.stage import Stage

from dynamo.scheduling.router.costs.predicted import TtftCost
from dynamo.scheduling.router.placement.solver import HoldLimits

HASHES = list(range(1, 1_001))


def test_every_prompt_that_went_is_settled_with_once() -> None:
    stage = Stage(1)
    computed, left = stage.submit(100, HASHES[:6]), stage.submit(100, HASHES[:6])
    placed = stage.place()
    assert stage.view.open == 2
    stage.placement.on_first_token(placed[computed.id], stage.now)
    assert stage.view.open == 1
    stage.placement.on_ended(placed[computed.id], stage.now)
    assert stage.view.open == 1
    stage.placement.on_ended(placed[left.id], stage.now)
    assert stage.view.open == 0


def test_whoever_is_told_that_there_is_no_worker_waits_no_more() -> None:
    stage = Stage(2)
    barred, kept = stage.submit(100, barred=frozenset("ab")), stage.submit(100)
    assert stage.placement.pop_unplaceable() == [barred]
    assert len(stage.placement) == 1
    assert stage.placement.pop_unplaceable() == []
    stage.fleet.update_instances({})
    assert stage.place() == {}
    assert stage.placement.pop_unplaceable() == [kept]
    assert len(stage.placement) == 0


def test_it_is_looked_again_when_a_worker_is_nearly_free_and_then_it_goes() -> None:
    stage = Stage(2, patience=HoldLimits(max_backlog_s=0.05))
    stage.busy("a", 20_000)
    stage.busy("b", 8_000)
    arrival = stage.submit(100)
    assert stage.place() == {}
    due = stage.placement.next_run_s(stage.now)
    assert due == pytest.approx(stage.fleet["b"].prefill_free_s - 0.05)
    stage.now = due + 1e-9
    assert stage.place()[arrival.id].worker.name == "b"


def test_or_when_patience_ends_and_then_it_goes() -> None:
    stage = Stage(1, patience=HoldLimits(max_hold_s=0.25))
    stage.busy("a", 100_000)
    arrival = stage.submit(100)
    assert stage.place() == {}
    stage.now += 0.1
    due = stage.placement.next_run_s(stage.now)
    assert due == arrival.arrived_s + 0.25
    stage.now = due
    assert arrival.id in stage.place()
    assert stage.placement.next_run_s(stage.now) is None


def test_what_is_due_already_is_looked_at_soon_and_not_at_once() -> None:
    stage = Stage(1)
    arrival = stage.submit(100, barred=frozenset("a"))
    stage.now += 100
    assert stage.place() == {}
    due = stage.placement.next_run_s(stage.now)
    assert due is not None
    assert stage.now < due < stage.now + 1.0
    assert stage.placement.pop_unplaceable() == [arrival]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_who_has_much_to_gain_waits_for_its_worker_below_the_threshold_too(
    threshold: float,
) -> None:
    stage = Stage(2, threshold=threshold)
    stage.view.caches["a"] = set(HASHES)
    busy = stage.busy("a", 6_000)
    arrival = stage.submit(16_016, HASHES)
    assert stage.place() == {}
    stage.placement.on_first_token(busy, stage.now)
    assert stage.place()[arrival.id].worker.name == "a"


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_a_burst_of_strangers_spreads(threshold: float) -> None:
    stage = Stage(4, TtftCost(), threshold=threshold)
    for _ in range(4):
        stage.submit(900)
    assert len(stage.place()) == 4
    assert sorted(stage.view.routes) == ["a", "b", "c", "d"]


def test_all_that_have_waited_go_in_one_round_when_there_is_room() -> None:
    stage = Stage(1)
    busy = stage.busy("a", 8_000)
    waiting = [stage.submit(20) for _ in range(60)]
    assert stage.place() == {}
    stage.placement.on_first_token(busy, stage.now)
    assert stage.place().keys() == {one.id for one in waiting}
