"""The interface of a cost: what sending a request to a worker costs, and the matrix of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Self

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.scheduling.router.policy import CandidateTable
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState
from dynamo.telemetry.story import Candidate

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_arrays import Floats, Indices, WorkerArrays
    from dynamo.scheduling.workers.workers import WorkerStates

TIE_TOLERANCE = 1e-3
"""Share of the best cost within which costs count as equal and the choice is random. Predictions
are not more exact than that."""

REGRET_WINDOW = 12
"""Requests that are placed jointly; the effort grows with its square."""

TABLE_ROWS = 16
"""Candidates that a decision keeps for explanation."""


class Cost(ABC):
    """Compute what a request costs at a worker; the lowest cost wins. `joint`: pending requests are
    placed together, and may be held for a nearly free worker. `uses_load_reports`: the cost depends
    on the workers' load reports. `has_arrays`: `costs_of_all` is implemented, and a
    placement makes its worker cheaper only for requests that share blocks with it.
    `tie_tolerance`: share of the best cost within which costs are equal."""

    joint = False
    uses_load_reports = False
    has_arrays = False
    tie_tolerance = TIE_TOLERANCE

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Self:
        """Make a cost of this class; most costs have no settings."""
        del settings
        return cls()

    @abstractmethod
    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        """Return the summands of the cost by name."""

    def cost(self, request: PendingRequest, worker: WorkerState, now: float) -> float:
        """Return the sum of the terms."""
        return sum(self.terms(request, worker, now).values())

    def costs_of_all(self, request: PendingRequest, arrays: WorkerArrays) -> Floats:
        """Return the cost of `request` at each worker, equal to `cost`, in a new array."""
        raise NotImplementedError(f"{type(self).__name__} has no costs over arrays")

    def make_arrays(self, states: WorkerStates) -> WorkerArrays:
        """Make the arrays that `costs_of_all` reads."""
        from dynamo.scheduling.router.worker_arrays import WorkerArrays

        return WorkerArrays(states)

    def build_shortlist(
        self,
        request: PendingRequest,
        arrays: WorkerArrays,
        excluded: Indices | None,
        choose: Callable[[Floats], Indices],
        now: float,
    ) -> CostMatrix:
        """Return the costs at a few workers. `choose` returns the entries of the lowest costs, none
        of them infinite. The workers at `excluded` must not be used."""
        costs = self.costs_of_all(request, arrays)
        if excluded is not None:
            costs[excluded] = inf
        return self.build_matrix(arrays.workers_at(choose(costs)), now)

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        """Return the costs of one placement round over `workers`."""
        return CostMatrix(self, workers, now)

    def begin_round(  # noqa: B027
        self, requests: Iterable[PendingRequest], workers: Sequence[WorkerState], now: float
    ) -> None:
        """Note the pending requests and the workers at the start of a placement round."""

    def on_placed(self, placed: PlacedRequest) -> None:  # noqa: B027 - most costs keep no state
        """Note that a request was sent to its worker."""

    def on_ended(self, placed: PlacedRequest) -> None:  # noqa: B027
        """Note that a request left its worker."""

    def update_settings(self, settings: RouterSettings) -> None:  # noqa: B027
        """Apply reloaded settings; most costs have none that can be reloaded."""


class CostMatrix:
    """The costs of one round, with a column for each of `workers`; calls `cost` for each pair.
    `allowed`: the number of workers that `workers` were chosen from; None: `workers` are all.
    `has_pairs`: `decode_index` may differ from the index of the worker that computes the prompt."""

    allowed: int | None = None
    has_pairs = False

    def __init__(self, cost: Cost, workers: Sequence[WorkerState], now: float) -> None:
        self.workers = workers
        self._cost = cost
        self._now = now

    def row(self, request: PendingRequest) -> list[float]:
        """Return the cost of `request` at each worker."""
        cost, now = self._cost.cost, self._now
        return [cost(request, worker, now) for worker in self.workers]

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        """Return the cost of each of `requests` at the worker `index`."""
        cost, worker, now = self._cost.cost, self.workers[index], self._now
        return [cost(request, worker, now) for request in requests]

    def refresh_worker(self, worker: WorkerState) -> int | None:
        """Read `worker` again after a placement. Return its index, or None without a column."""
        try:
            return self.workers.index(worker)
        except ValueError:
            return None

    def decode_index(self, request: PendingRequest, index: int) -> int:
        """Return the index of the worker that decodes if worker `index` computes the prompt."""
        del request
        return index

    def add_worker(self, worker: WorkerState) -> None:
        """Add a column for `worker` after the others."""
        self.workers = [*self.workers, worker]

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> CandidateTable:
        """Return the best candidates and the chosen one. `costs` is a result of `row` that does
        not change any more."""
        workers, overlaps, terms = self.workers, request.overlaps, self._cost.terms
        candidates = tuple(
            Candidate(
                workers[index].name,
                overlaps.get(workers[index].name, 0),
                costs[index],
                terms(request, workers[index], self._now),
                tier_blocks=request.tier_blocks(workers[index].name),
            )
            for index in best_indices(costs, chosen)
        )
        return lambda: candidates


def lowest_indices(costs: Sequence[float], tolerance: float = TIE_TOLERANCE) -> list[int]:
    """Return the indices of all costs within `tolerance`, a share of it, of the lowest. Costs that
    are NaN or infinite count only if there are no others."""
    best = min(costs)
    limit = best + abs(best) * tolerance
    lowest = [index for index, cost in enumerate(costs) if cost <= limit]
    if lowest:
        return lowest
    numbers = [cost for cost in costs if isfinite(cost)]
    return [index for index, cost in enumerate(costs) if not numbers or cost == min(numbers)]


def best_indices(costs: Sequence[float], chosen: int) -> list[int]:
    """Return up to TABLE_ROWS indices, lowest cost first, always with `chosen` among them."""
    order = sorted(range(len(costs)), key=costs.__getitem__)[:TABLE_ROWS]
    if chosen not in order:
        order[-1] = chosen
    return order
