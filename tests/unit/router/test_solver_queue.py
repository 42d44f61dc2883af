"""Requests that queue in the router: a threshold, an order, a bound."""

from __future__ import annotations

from random import Random

import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.errors import Overloaded
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.queue import WaitingQueue
from dynamo.scheduling.router.placement.solver import HoldLimits, PlacementSolver
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.worker_state import WorkerStates

BUDGET = 1000
INSTANCES = {
    name: Instance(
        name,
        f"tcp://{name}",
        "dynamo",
        "worker",
        "generate",
        {
            "engine": {
                "engine": "mock",
                "block_tokens": 16,
                "num_blocks": 100,
                "context_tokens": 1000,
                "max_num_seqs": 8,
                "max_num_batched_tokens": BUDGET,
            }
        },
    )
    for name in ("w1", "w2")
}


def placement(order: str = "fcfs", bound: int = 4, threshold: float = 1.0) -> PlacementSolver:
    fleet = WorkerStates()
    fleet.update_instances(INSTANCES)
    queue: WaitingQueue[PendingRequest] = WaitingQueue(order, bound)
    view = CacheView(SystemClock())
    return PlacementSolver(
        fleet,
        view,
        PredictedCost(),
        Random(1),
        hold_limits=HoldLimits(max_backlog_s=1e9),
        queue=queue,
        threshold=threshold,
    )


def arrival(name: str, tokens: int, now: float = 0.0, priority: int = 0) -> PendingRequest:
    one = PendingRequest(name, Prompt(tokens, []), 16, now)
    one.priority = priority
    return one


def fill(made: PlacementSolver) -> list[str]:
    """Both workers over the threshold."""
    for number in range(2):
        made.submit(arrival(f"big{number}", 2 * BUDGET))
    placed = made.place(0.0)
    assert {one.placed.worker.name for one in placed} == {"w1", "w2"}
    return [one.placed.id for one in placed]


def names(made: PlacementSolver, now: float) -> list[str]:
    return [one.request.id for one in made.place(now)]


@pytest.mark.parametrize(
    ("order", "first"), [("fcfs", "old"), ("shortest", "small"), ("deadline", "urgent")]
)
def test_who_waits_for_a_worker_goes_by_the_order(order: str, first: str) -> None:
    made = placement(order, threshold=0.5)
    fill(made)
    old, small, urgent = (
        arrival("old", 900, 1.0),
        arrival("small", 600, 2.0),
        arrival("urgent", 800, 3.0),
    )
    urgent.deadline_s = 5.0
    for one in (old, small, urgent):
        made.submit(one)
        assert names(made, one.arrived_s) == []
    assert len(made) == 3
    busy = made.worker_states["w1"].active[
        "big0" if "big0" in made.worker_states["w1"].active else "big1"
    ]
    made.on_ended(busy, 4.0)
    assert names(made, 4.0) == [first]
    assert len(made) == 2
    assert made.next_run_s(100.0) > 100.0  # type: ignore[operator]


def test_past_the_bound_newcomers_are_refused_and_told_when_to_come() -> None:
    made = placement(bound=2)
    fill(made)
    for number in range(5):
        made.submit(arrival(f"r{number}", 100, 1.0))
    assert names(made, 1.0) == []
    refused = made.pop_rejected()
    assert [one.id for one, _ in refused] == ["r2", "r3", "r4"]
    assert all(isinstance(error, Overloaded) and error.retry_after_s for _, error in refused)
    assert made.pop_rejected() == []
    assert len(made) == 2


def test_who_finds_a_worker_needs_no_room_to_wait() -> None:
    """All that wait may only go to w2; w1 is free."""
    made = placement(bound=2)
    fill(made)
    idle = next(one for one in made.worker_states["w1"].active.values())
    for number in range(3):
        one = arrival(f"r{number}", 100, 1.0)
        one.excluded = frozenset({"w1"})
        made.submit(one)
    assert names(made, 1.0) == []
    assert [one.id for one, _ in made.pop_rejected()] == ["r2"]
    made.on_ended(idle, 2.0)
    made.submit(arrival("free", 100, 2.0))
    assert names(made, 2.0) == ["free"]
    assert made.pop_rejected() == []
    assert len(made) == 2


def test_a_burst_that_can_be_placed_is_not_refused() -> None:
    made = placement(bound=1, threshold=0.0)
    for number in range(20):
        made.submit(arrival(f"r{number}", 10))
    assert len(names(made, 0.0)) == 20
    assert made.pop_rejected() == []


def test_who_leaves_waits_no_more() -> None:
    made = placement()
    fill(made)
    waiting, fresh = arrival("waiting", 100), arrival("fresh", 100)
    made.submit(waiting)
    made.place(1.0)
    made.submit(fresh)
    made.cancel(waiting)
    made.cancel(fresh)
    made.cancel(fresh)
    assert len(made) == 0
    assert made.next_run_s(2.0) is None
