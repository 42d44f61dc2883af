"""The solver with a bounded queue: threshold, order and rejection."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.router.fake_cluster import place_all

from dynamo.core.clock import SystemClock
from dynamo.core.errors import Overloaded
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.placement.candidates import HoldLimits
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.queue import PendingRequest, WaitingQueue
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt

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


def make_solver(order: str = "fcfs", bound: int = 4, threshold: float = 1.0) -> PlacementSolver:
    ledger = Ledger()
    ledger.workers.update_instances(INSTANCES)
    queue: WaitingQueue[PendingRequest] = WaitingQueue(order, bound)
    view = CacheView(SystemClock())
    return PlacementSolver(
        ledger,
        view,
        PredictedCost(),
        Random(1),
        hold_limits=HoldLimits(max_backlog_s=1e9),
        queue=queue,
        threshold=threshold,
    )


def make_request(name: str, tokens: int, now: float = 0.0, priority: int = 0) -> PendingRequest:
    request = PendingRequest(name, Prompt(tokens, []), 16, now)
    request.priority = priority
    return request


def fill(solver: PlacementSolver) -> list[str]:
    """Put both workers over the threshold; return the ids of the placed requests."""
    for number in range(2):
        solver.submit(make_request(f"big{number}", 2 * BUDGET))
    placed = solver.place(0.0)
    assert {result.placed.worker.name for result in placed} == {"w1", "w2"}
    return [result.placed.key for result in placed]


def place_ids(solver: PlacementSolver, now: float) -> list[str]:
    return [result.request.id for result in place_all(solver, now)]


@pytest.mark.parametrize(
    ("order", "first"), [("fcfs", "old"), ("shortest", "small"), ("deadline", "urgent")]
)
def test_queued_requests_are_placed_in_queue_order(order: str, first: str) -> None:
    solver = make_solver(order, threshold=0.5)
    fill(solver)
    old, small, urgent = (
        make_request("old", 900, 1.0),
        make_request("small", 600, 2.0),
        make_request("urgent", 800, 3.0),
    )
    urgent.deadline_s = 5.0
    for request in (old, small, urgent):
        solver.submit(request)
        assert place_ids(solver, request.arrived_s) == []
    assert len(solver) == 3
    busy = "big0" if "big0" in solver.worker_states["w1"].active else "big1"
    solver.ledger.end(solver.ledger.requests[busy], None)
    assert place_ids(solver, 4.0) == [first]
    assert len(solver) == 2
    assert solver.next_run_s(100.0) > 100.0  # type: ignore[operator]


def test_new_requests_beyond_the_bound_are_rejected_with_a_retry_time() -> None:
    solver = make_solver(bound=2)
    fill(solver)
    for number in range(5):
        solver.submit(make_request(f"r{number}", 100, 1.0))
    assert place_ids(solver, 1.0) == []
    refused = solver.pop_rejected()
    assert [request.id for request, _ in refused] == ["r2", "r3", "r4"]
    assert all(isinstance(error, Overloaded) and error.retry_after_s for _, error in refused)
    assert solver.pop_rejected() == []
    assert len(solver) == 2


def test_a_request_with_a_free_worker_needs_no_place_in_the_queue() -> None:
    """All queued requests may only use w2; w1 is free."""
    solver = make_solver(bound=2)
    fill(solver)
    idle = next(iter(solver.worker_states["w1"].active))
    for number in range(3):
        request = make_request(f"r{number}", 100, 1.0)
        request.excluded = frozenset({"w1"})
        solver.submit(request)
    assert place_ids(solver, 1.0) == []
    assert [request.id for request, _ in solver.pop_rejected()] == ["r2"]
    solver.ledger.end(solver.ledger.requests[idle], None)
    solver.submit(make_request("free", 100, 2.0))
    assert place_ids(solver, 2.0) == ["free"]
    assert solver.pop_rejected() == []
    assert len(solver) == 2


def test_a_burst_that_can_be_placed_is_not_rejected() -> None:
    solver = make_solver(bound=1, threshold=0.0)
    for number in range(20):
        solver.submit(make_request(f"r{number}", 10))
    assert len(place_ids(solver, 0.0)) == 20
    assert solver.pop_rejected() == []


def test_a_cancelled_request_leaves_the_queue() -> None:
    solver = make_solver()
    fill(solver)
    waiting, fresh = make_request("waiting", 100), make_request("fresh", 100)
    solver.submit(waiting)
    solver.place(1.0)
    solver.submit(fresh)
    solver.cancel(waiting)
    solver.cancel(fresh)
    solver.cancel(fresh)
    assert len(solver) == 0
    assert solver.next_run_s(2.0) is None
