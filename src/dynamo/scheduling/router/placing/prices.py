"""What a round of placing goes by: every worker's price at one moment, looked at once for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.fleet import Book
from dynamo.scheduling.router.policy import Candidate

TABLE_ROWS = 16
"""Candidates kept for explanation."""


class Prices(ABC):
    """Of `books`, in their order."""

    books: Sequence[Book]

    @abstractmethod
    def row(self, request: Arrival) -> list[float]:
        """What each of the books costs for `request`."""

    @abstractmethod
    def column(self, requests: Sequence[Arrival], at: int) -> list[float]:
        """What one of the books costs for each of `requests`."""

    def moved(self, book: Book) -> int | None:
        """Something went to `book`: look at it anew. Its index; None where it is none of these."""
        try:
            return self.books.index(book)
        except ValueError:
            return None

    @abstractmethod
    def table(self, request: Arrival, costs: Sequence[float], at: int) -> Sequence[Candidate]:
        """The best rows and the one that was taken, as prices are now. `costs`: what `row` gave,
        which nobody changes any more."""


Rate = tuple[str, float, int, float, float, float]
"""Of one worker: its name, milliseconds a token, tokens a step, milliseconds a step, what a prefill
counts for with the harm that it does, milliseconds before it begins."""


class PredictedPrices(Prices):
    """Predicted times, in milliseconds: see `PredictedCost`."""

    def __init__(self, books: Sequence[Book], now: float, harm: float, eviction: float) -> None:
        self.books = books
        self._now = now
        self._harm = harm
        self._eviction = eviction
        self._rates = [rate_of(book, harm, now) for book in books]

    def row(self, request: Arrival) -> list[float]:
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

    def moved(self, book: Book) -> int | None:
        at = super().moved(book)
        if at is not None:
            self._rates[at] = rate_of(book, self._harm, self._now)
        return at

    def column(self, requests: Sequence[Arrival], at: int) -> list[float]:
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

    def table(self, request: Arrival, costs: Sequence[float], at: int) -> Sequence[Candidate]:
        rates, held = self._rates, request.overlaps
        if len(rates) > TABLE_ROWS:
            order = best_rows(costs, at)
            rates = [rates[index] for index in order]
            costs = [costs[index] for index in order]
            held = {rate[0]: held[rate[0]] for rate in rates if rate[0] in held}
        else:
            rates = rates.copy()
        return PredictedTable(request, held, rates, costs, self._eviction)


class PredictedTable(Sequence[Candidate]):
    """Numbers until somebody asks: most tables are never looked at."""

    __slots__ = ("_costs", "_eviction", "_held", "_made", "_rates", "_size", "_tokens")

    def __init__(
        self,
        request: Arrival,
        held: Mapping[str, int],
        rates: Sequence[Rate],
        costs: Sequence[float],
        eviction: float,
    ) -> None:
        self._held = held
        self._tokens = request.prompt.tokens
        self._size = request.block_tokens
        self._rates = rates
        self._costs = costs
        self._eviction = eviction
        self._made: tuple[Candidate, ...] | None = None

    def __len__(self) -> int:
        return len(self._costs)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | Sequence[Candidate]:
        if self._made is None:
            self._made = tuple(sorted(self._rows(), key=lambda row: row.cost))
        return self._made[at]

    def _rows(self) -> Iterator[Candidate]:
        for rate, cost in zip(self._rates, self._costs, strict=True):
            overlap = self._held.get(rate[0], 0)
            new = max(1, self._tokens - overlap * self._size)
            yield Candidate(rate[0], overlap, cost, terms_at(rate, new, self._eviction))


def rate_of(book: Book, harm: float, now: float) -> Rate:
    """What the book says now."""
    wait = abs(book.free_s - now) * 1e3 if book.open_count else 0.0
    weight = 1.0 + harm * book.youth
    return book.name, book.token_ms, book.token_budget, book.step_ms, weight, wait


def terms_at(rate: Rate, new: int, eviction: float) -> dict[str, float]:
    """What so many new tokens cost there, by name."""
    _, token, budget, step, weight, wait = rate
    service = -(-new // budget) * step + token * new
    return {
        "queue": wait,
        "prefill": service,
        "harm": service * (weight - 1.0),
        "eviction": eviction * (token * new),
    }


def best_rows(costs: Sequence[float], taken: int) -> list[int]:
    """The indices of the lowest costs, lowest first, with that of the one that was taken."""
    order = sorted(range(len(costs)), key=costs.__getitem__)[:TABLE_ROWS]
    if taken not in order:
        order[-1] = taken
    return order
