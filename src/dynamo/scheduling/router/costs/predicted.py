"""What a round of placing goes by: every worker's price at one moment, looked at once for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.policy import Candidate
from dynamo.scheduling.router.worker_state import WorkerState

TABLE_ROWS = 16
"""Candidates kept for explanation."""


class CostMatrix(ABC):
    """Of `books`, in their order."""

    workers: Sequence[WorkerState]

    @abstractmethod
    def row(self, request: PendingRequest) -> list[float]:
        """What each of the books costs for `request`."""

    @abstractmethod
    def column(self, requests: Sequence[PendingRequest], at: int) -> list[float]:
        """What one of the books costs for each of `requests`."""

    def refresh_worker(self, book: WorkerState) -> int | None:
        """Something went to `book`: look at it anew. Its index; None where it is none of these."""
        try:
            return self.workers.index(book)
        except ValueError:
            return None

    @abstractmethod
    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], at: int
    ) -> Sequence[Candidate]:
        """The best rows and the one that was taken, as prices are now. `costs`: what `row` gave,
        which nobody changes any more."""


WorkerRate = tuple[str, float, int, float, float, float]
"""Of one worker: its name, milliseconds a token, tokens a step, milliseconds a step, what a prefill
counts for with the harm that it does, milliseconds before it begins."""


class PredictedCostMatrix(CostMatrix):
    """Predicted times, in milliseconds: see `PredictedCost`."""

    def __init__(
        self, books: Sequence[WorkerState], now: float, harm: float, eviction: float
    ) -> None:
        self.workers = books
        self._now = now
        self._harm = harm
        self._eviction = eviction
        self._rates = [worker_rate(book, harm, now) for book in books]

    def row(self, request: PendingRequest) -> list[float]:
        tokens, size, eviction = request.prompt.tokens, request.block_tokens, self._eviction
        held = request.overlaps.get
        return [  # the terms written out: this runs once a worker and request
            ((step if new <= budget else -(-new // budget) * step) + own) * weight
            + eviction * own
            + wait
            for name, token, budget, step, weight, wait in self._rates
            for left in [tokens - held(name, 0) * size]
            for new in [left if left > 0 else 1]
            for own in [token * new]
        ]

    def refresh_worker(self, book: WorkerState) -> int | None:
        at = super().refresh_worker(book)
        if at is not None:
            self._rates[at] = worker_rate(book, self._harm, self._now)
        return at

    def column(self, requests: Sequence[PendingRequest], at: int) -> list[float]:
        name, token, budget, step, weight, wait = self._rates[at]
        eviction = self._eviction
        costs = []
        for request in requests:
            new = request.prompt.tokens
            if name in request.overlaps:
                new = max(1, new - request.overlaps[name] * request.block_tokens)
            own = token * new
            costs.append((-(-new // budget) * step + own) * weight + eviction * own + wait)
        return costs

    def candidate_table(
        self, request: PendingRequest, costs: Sequence[float], at: int
    ) -> Sequence[Candidate]:
        rates, held = self._rates, request.overlaps
        if len(rates) > TABLE_ROWS:
            order = best_indices(costs, at)
            rates = [rates[index] for index in order]
            costs = [costs[index] for index in order]
            held = {rate[0]: held[rate[0]] for rate in rates if rate[0] in held}
        else:
            rates = rates.copy()
        return LazyCandidateTable(request, held, rates, costs, self._eviction)


class LazyCandidateTable(Sequence[Candidate]):
    """Numbers until somebody asks: most tables are never looked at."""

    __slots__ = (
        "_block_tokens",
        "_candidates",
        "_costs",
        "_eviction",
        "_overlaps",
        "_prompt_tokens",
        "_rates",
    )

    def __init__(
        self,
        request: PendingRequest,
        held: Mapping[str, int],
        rates: Sequence[WorkerRate],
        costs: Sequence[float],
        eviction: float,
    ) -> None:
        self._overlaps = held
        self._prompt_tokens = request.prompt.tokens
        self._block_tokens = request.block_tokens
        self._rates = rates
        self._costs = costs
        self._eviction = eviction
        self._candidates: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return len(self._costs)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if self._candidates is None:
            self._candidates = tuple(sorted(self._build_candidates(), key=lambda row: row.cost))
        return self._candidates[at]

    def _build_candidates(self) -> Iterator[Candidate]:
        for rate, cost in zip(self._rates, self._costs, strict=True):
            overlap = self._overlaps.get(rate[0], 0)
            new = max(1, self._prompt_tokens - overlap * self._block_tokens)
            yield Candidate(rate[0], overlap, cost, predicted_terms(rate, new, self._eviction))


def worker_rate(book: WorkerState, harm: float, now: float) -> WorkerRate:
    """What the book says now."""
    wait = abs(book.prefill_free_s - now) * 1e3 if book.pending_prefills else 0.0
    weight = 1.0 + harm * book.stall_sensitivity
    return book.name, book.token_ms, book.token_budget, book.step_ms, weight, wait


def predicted_terms(rate: WorkerRate, new: int, eviction: float) -> dict[str, float]:
    """What so many new tokens cost there, by name."""
    _, token, budget, step, weight, wait = rate
    service = -(-new // budget) * step + token * new
    return {
        "queue": wait,
        "prefill": service,
        "harm": service * (weight - 1.0),
        "eviction": eviction * (token * new),
    }


def best_indices(costs: Sequence[float], taken: int) -> list[int]:
    """The indices of the lowest costs, lowest first, with that of the one that was taken."""
    order = sorted(range(len(costs)), key=costs.__getitem__)[:TABLE_ROWS]
    if taken not in order:
        order[-1] = taken
    return order
