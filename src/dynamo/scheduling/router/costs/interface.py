"""What it costs to send a request to a worker: the interface, and predicted time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.scheduling.router.costs.predicted import (
    CostMatrix,
    PredictedCostMatrix,
    best_indices,
    predicted_terms,
    worker_rate,
)
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState

AFFINITY_BONUS_MS = 1e6
"""What a block that is there already weighs with affinity: more than any queue."""


TIE_TOLERANCE = 1e-3
"""Costs nearer than this share of the best are equal, and chance decides: predictions are no
better than that."""


class Cost(ABC):
    """Prices a worker for a request; the lowest wins. `joint`: what waits is placed together, and
    may wait a moment for a worker that is nearly free; `tie`: the share of the best within which
    costs are equal; `reads_loads`: it goes by what workers report of themselves."""

    joint = False
    uses_load_reports = False
    tie_tolerance = TIE_TOLERANCE

    @abstractmethod
    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        """What the cost is the sum of, by name."""

    def cost(self, request: PendingRequest, book: WorkerState, now: float) -> float:
        """The sum of the terms."""
        return sum(self.terms(request, book, now).values())

    def build_matrix(self, books: Sequence[WorkerState], now: float) -> CostMatrix:
        """Of a round: what each of `books` costs at that moment."""
        return PairwiseCostMatrix(self, books, now)

    def on_placed(self, active: PlacedRequest) -> None:  # noqa: B027 - most keep no books of their own
        """The request went to its worker."""

    def on_ended(self, active: PlacedRequest) -> None:  # noqa: B027
        """It left."""


class PairwiseCostMatrix(CostMatrix):
    """Asks the cost for each."""

    def __init__(self, cost: Cost, books: Sequence[WorkerState], now: float) -> None:
        self.workers = books
        self._cost = cost
        self._now = now

    def row(self, request: PendingRequest) -> list[float]:
        cost, now = self._cost.cost, self._now
        return [cost(request, book, now) for book in self.workers]

    def column(self, requests: Sequence[PendingRequest], at: int) -> list[float]:
        cost, book, now = self._cost.cost, self.workers[at], self._now
        return [cost(request, book, now) for request in requests]

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], at: int
    ) -> Sequence[Candidate]:
        books, overlaps, terms = self.workers, request.overlaps, self._cost.terms
        return tuple(
            Candidate(
                books[index].name,
                overlaps.get(books[index].name, 0),
                costs[index],
                terms(request, books[index], self._now),
            )
            for index in best_indices(costs, at)
        )


class PredictedCost(Cost):
    """Predicted time to first token, in milliseconds, plus two prices: what the prefill takes from
    the answers that are being written there (the younger, the more its pace suffers), and what a
    duplicate costs later (it evicts something that must be computed again)."""

    joint = True

    def __init__(self, harm: float = 5.0, eviction: float = 0.5) -> None:
        self._harm = harm
        self._eviction = eviction

    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        rate = worker_rate(book, self._harm, now)
        return predicted_terms(rate, request.uncached_tokens(book.name), self._eviction)

    def build_matrix(self, books: Sequence[WorkerState], now: float) -> CostMatrix:
        return PredictedCostMatrix(books, now, self._harm, self._eviction)


class TtftCost(Cost):
    """Predicted time to first token alone; no parameter."""

    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        prefill = book.predict_prefill_ms(request.uncached_tokens(book.name))
        return {"queue": book.backlog_ms(now), "prefill": prefill}

    def cost(self, request: PendingRequest, book: WorkerState, now: float) -> float:
        return book.backlog_ms(now) + book.predict_prefill_ms(request.uncached_tokens(book.name))


class AffinityCost(Cost):
    """Back to where most of the conversation is, unless more than `spill_ms` of prefill wait there;
    a prompt that is mostly new goes where least waits."""

    def __init__(self, spill_ms: float = 500.0) -> None:
        self._spill_ms = spill_ms

    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        backlog = book.backlog_ms(now)
        overlap = request.overlaps.get(book.name, 0)
        at_home = 2 * overlap >= len(request.prompt.hashes) and backlog <= self._spill_ms
        stays = -AFFINITY_BONUS_MS * overlap if overlap and at_home else 0.0
        return {"queue": backlog, "stays": stays, "load": book.step_ms * len(book.active)}
