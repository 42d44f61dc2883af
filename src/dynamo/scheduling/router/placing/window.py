"""Requests that are weighed together, and which of them goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
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


class Window:
    """Requests weighed together: whoever would lose most by not getting its best worker is first.
    Some stand in line, the longest first: of these only the head is weighed with the others, and
    no other has a price."""

    def __init__(
        self, others: Sequence[Arrival], line: Sequence[Arrival], price: Callable[[Arrival], Row]
    ) -> None:
        """`line`: those to which workers differ by their load alone; `price`: what an arrival costs
        at that moment."""
        self._price = price
        self._rows = [price(one) for one in others]
        self._head: Row | None = None
        self._stand(sorted(line, key=_tokens, reverse=True)[::-1])

    def take(self) -> Row | None:
        """Whose turn it is, which leaves; None: nobody is left."""
        rows = self._rows
        if self._line and self._head not in rows:
            self._new_blocks.pop()
            self._head = self._price(self._line.pop())
            rows.append(self._head)
        if not rows:
            return None
        best = max(rows, key=_regret) if len(rows) > 1 else rows[0]
        rows.remove(best)
        return best

    def stays(self, row: Row, due: Callable[[Arrival], bool]) -> None:
        """It was taken and would rather wait. So would those who stood in line behind it: unless
        they are `due`, they leave."""
        if row is self._head:
            self._stand([one for one in self._line if due(one)])

    def keep(self, due: Callable[[Arrival], bool]) -> None:
        """The others leave."""
        self._rows = [row for row in self._rows if due(row.arrival)]
        self._stand([one for one in self._line if due(one)])

    def went(self, active: Active, blocks: AbstractSet[int], common: Prices, rng: Random) -> None:
        """Its worker has more to do for the others, and will hold what they share with it.
        `blocks`: all that the round brought there; `common`: the prices of all workers, which
        those go by that may go to any."""
        groups: dict[Prices, list[Row]] = {common: []}
        for row in self._rows:
            _shares(row.arrival, active)
            groups.setdefault(row.prices, []).append(row)
        for prices, group in groups.items():
            at = prices.moved(active.book)
            if at is not None and group:
                costs = prices.column([row.arrival for row in group], at)
                for row, cost in zip(group, costs, strict=True):
                    row.put(at, cost, rng)
        if not blocks.isdisjoint(self._new_blocks):
            self._part(active)

    def _part(self, active: Active) -> None:
        """Who begins as the one that went does has a favourite now."""
        line = []
        for one in self._line:
            if _shares(one, active):
                self._rows.append(self._price(one))
            else:
                line.append(one)
        self._stand(line)

    def _stand(self, line: list[Arrival]) -> None:
        self._line = line
        self._new_blocks = [_new_block(one) for one in line]


def _tokens(arrival: Arrival) -> int:
    return arrival.prompt.tokens


def _new_block(arrival: Arrival) -> int | None:
    """The first that nobody holds, if there is one."""
    held, hashes = next(iter(arrival.overlaps.values()), 0), arrival.prompt.hashes
    return hashes[held] if held < len(hashes) else None


_regret = attrgetter("regret")


def _shares(arrival: Arrival, active: Active) -> bool:
    """Whether the other one brings its worker more of this prompt, which is noted."""
    name, theirs = active.book.name, active.hashes
    mine, held = arrival.prompt.hashes, arrival.overlaps.get(name, 0)
    if held < len(mine) and held < len(theirs) and mine[held] == theirs[held]:
        arrival.overlaps[name] = common_blocks(mine, theirs)
        return True
    return False


def lowest(costs: Sequence[float], rng: Random, tie: float = TIE) -> int:
    """The lowest; among equals, nearer than `tie` of the best, any."""
    best = min(costs)
    limit = best + abs(best) * tie
    equal = [index for index, cost in enumerate(costs) if cost <= limit]
    return equal[0] if len(equal) == 1 else equal[int(rng.random() * len(equal))]
