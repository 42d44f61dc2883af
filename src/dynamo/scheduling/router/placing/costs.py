"""What it costs to send a request to a worker: the interface, and predicted time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.fleet import Active, Book
from dynamo.scheduling.router.placing.prices import (
    PredictedPrices,
    Prices,
    best_rows,
    rate_of,
    terms_at,
)
from dynamo.scheduling.router.policy import Candidate

AT_HOME_MS = 1e6
"""What a block that is there already weighs with affinity: more than any queue."""


TIE = 1e-3
"""Costs nearer than this share of the best are equal, and chance decides: predictions are no
better than that."""


class Cost(ABC):
    """Prices a worker for a request; the lowest wins. `joint`: what waits is placed together, and
    may wait a moment for a worker that is nearly free; `tie`: the share of the best within which
    costs are equal; `reads_loads`: it goes by what workers report of themselves."""

    joint = False
    reads_loads = False
    tie = TIE

    @abstractmethod
    def terms(self, request: Arrival, book: Book, now: float) -> dict[str, float]:
        """What the cost is the sum of, by name."""

    def cost(self, request: Arrival, book: Book, now: float) -> float:
        """The sum of the terms."""
        return sum(self.terms(request, book, now).values())

    def prices(self, books: Sequence[Book], now: float) -> Prices:
        """Of a round: what each of `books` costs at that moment."""
        return PlainPrices(self, books, now)

    def placed(self, active: Active) -> None:  # noqa: B027 - most keep no books of their own
        """The request went to its worker."""

    def ended(self, active: Active) -> None:  # noqa: B027
        """It left."""


class PlainPrices(Prices):
    """Asks the cost for each."""

    def __init__(self, cost: Cost, books: Sequence[Book], now: float) -> None:
        self.books = books
        self._cost = cost
        self._now = now

    def row(self, request: Arrival) -> list[float]:
        cost, now = self._cost.cost, self._now
        return [cost(request, book, now) for book in self.books]

    def column(self, requests: Sequence[Arrival], at: int) -> list[float]:
        cost, book, now = self._cost.cost, self.books[at], self._now
        return [cost(request, book, now) for request in requests]

    def table(self, request: Arrival, costs: Sequence[float], at: int) -> Sequence[Candidate]:
        books, overlaps, terms = self.books, request.overlaps, self._cost.terms
        return tuple(
            Candidate(
                books[index].name,
                overlaps.get(books[index].name, 0),
                costs[index],
                terms(request, books[index], self._now),
            )
            for index in best_rows(costs, at)
        )


class PredictedCost(Cost):
    """Predicted time to first token, in milliseconds, plus two prices: what the prefill takes from
    the answers that are being written there (the younger, the more its pace suffers), and what a
    duplicate costs later (it evicts something that must be computed again)."""

    joint = True

    def __init__(self, harm: float = 5.0, eviction: float = 0.5) -> None:
        self._harm = harm
        self._eviction = eviction

    def terms(self, request: Arrival, book: Book, now: float) -> dict[str, float]:
        rate = rate_of(book, self._harm, now)
        return terms_at(rate, request.new_tokens(book.name), self._eviction)

    def prices(self, books: Sequence[Book], now: float) -> Prices:
        return PredictedPrices(books, now, self._harm, self._eviction)


class TtftCost(Cost):
    """Predicted time to first token alone; no parameter."""

    def terms(self, request: Arrival, book: Book, now: float) -> dict[str, float]:
        prefill = book.service_ms(request.new_tokens(book.name))
        return {"queue": book.backlog_ms(now), "prefill": prefill}

    def cost(self, request: Arrival, book: Book, now: float) -> float:
        return book.backlog_ms(now) + book.service_ms(request.new_tokens(book.name))


class AffinityCost(Cost):
    """Back to where most of the conversation is, unless more than `spill_ms` of prefill wait there;
    a prompt that is mostly new goes where least waits."""

    def __init__(self, spill_ms: float = 500.0) -> None:
        self._spill_ms = spill_ms

    def terms(self, request: Arrival, book: Book, now: float) -> dict[str, float]:
        backlog = book.backlog_ms(now)
        overlap = request.overlaps.get(book.name, 0)
        at_home = 2 * overlap >= len(request.prompt.hashes) and backlog <= self._spill_ms
        stays = -AT_HOME_MS * overlap if overlap and at_home else 0.0
        return {"queue": backlog, "stays": stays, "load": book.step_ms * len(book.active)}
