"""The costs of other packages: what they return is checked, and replaced where it is no cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf, isnan
from numbers import Real
from typing import TYPE_CHECKING, Any

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.scheduling.router.costs.interface import Cost, CostMatrix
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.policy import CandidateTable
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_arrays import Floats, WorkerArrays
    from dynamo.scheduling.workers.workers import WorkerStates

log = logging.getLogger(__name__)

OWN_PACKAGE = "dynamo."


def checked(cost: Cost) -> Cost:
    """Return a cost of this package as it is, and another one as a `CheckedCost`."""
    own = type(cost).__module__.startswith(OWN_PACKAGE)
    return cost if own else CheckedCost(cost)


class CheckedCost(Cost):
    """Pass calls on to `cost`. A request whose costs are no numbers (NaN, minus infinity, another
    type, none finite) or cannot be computed is priced by `PredictedCost`. The first such failure
    is logged."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._predicted = PredictedCost()
        self._failed = False
        self.joint = cost.joint
        self.uses_load_reports = cost.uses_load_reports
        self.has_arrays = cost.has_arrays
        self.tie_tolerance = cost.tie_tolerance

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        terms = self.attempt(lambda: _numbers(self._cost.terms(request, worker, now)))
        return {} if terms is None else terms

    def costs_of_all(self, request: PendingRequest, arrays: WorkerArrays) -> Floats:
        costs: Floats | None = self.attempt(
            lambda: _checked_array(self._cost.costs_of_all(request, arrays))
        )
        if costs is None or len(costs) != len(arrays.workers):
            return self._predicted.costs_of_all(request, arrays)
        return costs

    def make_arrays(self, states: WorkerStates) -> WorkerArrays:
        arrays = self.attempt(lambda: self._cost.make_arrays(states))
        return super().make_arrays(states) if arrays is None else arrays

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CostMatrix:
        return CheckedMatrix(self, self._cost, self._predicted, workers, now)

    def begin_round(
        self, requests: Iterable[PendingRequest], workers: Sequence[WorkerState], now: float
    ) -> None:
        self.attempt(lambda: self._cost.begin_round(requests, workers, now))

    def on_placed(self, placed: PlacedRequest) -> None:
        self.attempt(lambda: self._cost.on_placed(placed))

    def on_ended(self, placed: PlacedRequest) -> None:
        self.attempt(lambda: self._cost.on_ended(placed))

    def update_settings(self, settings: RouterSettings) -> None:
        self.attempt(lambda: self._cost.update_settings(settings))

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, or None if it fails."""
        try:
            return call()
        except Exception:  # a cost may be a user's code
            if not self._failed:
                self._failed = True
                log.exception(
                    "the router's cost failed; predicted times choose where it does",
                    extra={"fields": {"cost": type(self._cost).__name__}},
                )
            return None


class CheckedMatrix(CostMatrix):
    """The matrix of another package's cost, or its costs for each pair, with a matrix of predicted
    costs for the requests that fail."""

    def __init__(
        self,
        checked_cost: CheckedCost,
        cost: Cost,
        predicted: PredictedCost,
        workers: Sequence[WorkerState],
        now: float,
    ) -> None:
        super().__init__(checked_cost, workers, now)
        self._attempt = checked_cost.attempt
        matrix = self._attempt(lambda: cost.build_matrix(workers, now))
        self._matrix = matrix if isinstance(matrix, CostMatrix) else CostMatrix(cost, workers, now)
        self._predicted = predicted.build_matrix(workers, now)
        self._predicted_requests: set[str] = set()
        self.has_pairs = self._matrix.has_pairs

    def row(self, request: PendingRequest) -> list[float]:
        costs = self._attempt(lambda: _checked_row(self._matrix.row(request), len(self.workers)))
        if costs is None:
            self._predicted_requests.add(request.id)
            return self._predicted.row(request)
        self._predicted_requests.discard(request.id)
        return list(costs)

    def column(self, requests: Sequence[PendingRequest], index: int) -> list[float]:
        return [
            self._predicted.column([request], index)[0]
            if request.id in self._predicted_requests
            else self._cost_at(request, index)
            for request in requests
        ]

    def decode_index(self, request: PendingRequest, index: int) -> int:
        if request.id in self._predicted_requests:
            return index
        decode = self._attempt(
            lambda: range(len(self.workers))[self._matrix.decode_index(request, index)]
        )
        return index if decode is None else decode

    def _cost_at(self, request: PendingRequest, index: int) -> float:
        costs = self._attempt(lambda: [*map(_number, self._matrix.column([request], index))])
        return costs[0] if costs else inf

    def refresh_worker(self, worker: WorkerState) -> int | None:
        self._attempt(lambda: self._matrix.refresh_worker(worker))
        self._predicted.refresh_worker(worker)
        return super().refresh_worker(worker)

    def add_worker(self, worker: WorkerState) -> None:
        self._attempt(lambda: self._matrix.add_worker(worker))
        self._predicted.add_worker(worker)
        super().add_worker(worker)

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], chosen: int
    ) -> CandidateTable:
        if request.id in self._predicted_requests:
            return self._predicted.candidate_table(request, costs, chosen)
        return super().candidate_table(request, costs, chosen)


def _number(value: Any) -> float:
    """Return a cost as a float. Raises `TypeError` and `ValueError`; plus infinity is a cost."""
    if not isinstance(value, Real):
        raise TypeError(f"a cost must be a number, not {value!r:.100}")
    number = float(value)
    if isnan(number) or number == -inf:
        raise ValueError(f"a cost must be a number, not {number}")
    return number


def _checked_row(values: Iterable[Any], workers: int) -> list[float]:
    costs = [_number(value) for value in values]
    if len(costs) != workers or not any(cost < inf for cost in costs):
        raise ValueError(f"{len(costs)} costs for {workers} workers, or none of them finite")
    return costs


def _checked_array(costs: Floats) -> Floats:
    _checked_row(costs.tolist(), len(costs))
    return costs.astype(float)


def _numbers(terms: dict[Any, Any]) -> dict[str, float]:
    return {str(name): _number(value) for name, value in terms.items()}
