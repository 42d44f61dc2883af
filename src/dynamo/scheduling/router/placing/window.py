"""Requests that are weighed together, and which of them goes first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from random import Random

from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.costs import TIE
from dynamo.scheduling.router.placing.fleet import Active, Book
from dynamo.scheduling.router.placing.prices import Prices
from dynamo.scheduling.router.prompt import common_blocks


class Row:
    """One waiting request with its costs. `at`: its best worker; `regret`: what not getting that
    would cost."""

    __slots__ = ("_equals", "_second", "arrival", "at", "costs", "prices", "regret")

    def __init__(self, arrival: Arrival, prices: Prices, rng: Random) -> None:
        self.arrival = arrival
        self.prices = prices
        self.costs = prices.row(arrival)
        self._rank(rng)

    @property
    def book(self) -> Book:
        """Its best worker's."""
        return self.prices.books[self.at]

    def put(self, at: int, cost: float, rng: Random) -> None:
        """One worker costs something else now."""
        before = self.costs[at]
        self.costs[at] = cost
        second = self._second
        if self._equals or at == self.at or before <= second or cost <= second:
            self._rank(rng)

    def _rank(self, rng: Random) -> None:
        costs = self.costs
        order = sorted(costs)  # quicker than to look for the lowest
        best = order[0]
        self._second = second = order[1] if len(order) > 1 else inf
        self.regret = second - best if second < inf else 0.0
        limit = best + abs(best) * TIE
        self._equals = second <= limit
        if self._equals:
            equal = [index for index, cost in enumerate(costs) if cost <= limit]
            self.at = equal[int(rng.random() * len(equal))]
        else:
            self.at = costs.index(best)


keenest = attrgetter("regret")


def another_went(rows: Sequence[Row], active: Active, common: Prices, rng: Random) -> None:
    """Its worker has more to do for these, and will hold what they share with it. `common`: the
    prices of all workers, which those go by that may go to any."""
    book = active.book
    name, theirs = book.name, active.hashes
    by_prices: dict[Prices, list[Row]] = {common: []}
    for row in rows:
        arrival = row.arrival
        mine, held = arrival.prompt.hashes, arrival.overlaps.get(name, 0)
        if held < len(mine) and held < len(theirs) and mine[held] == theirs[held]:
            arrival.overlaps[name] = common_blocks(mine, theirs)
        by_prices.setdefault(row.prices, []).append(row)
    for prices, group in by_prices.items():
        at = prices.moved(book)
        if at is not None and group:
            costs = prices.column([row.arrival for row in group], at)
            for row, cost in zip(group, costs, strict=True):
                row.put(at, cost, rng)


def lowest(costs: Sequence[float], rng: Random, tie: float = TIE) -> int:
    """The lowest; among equals, nearer than `tie` of the best, any."""
    best = min(costs)
    limit = best + abs(best) * tie
    equal = [index for index, cost in enumerate(costs) if cost <= limit]
    return equal[0] if len(equal) == 1 else equal[int(rng.random() * len(equal))]
