"""Requests that are weighed together, and which of them goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from operator import attrgetter
from random import Random

from dynamo.scheduling.router.costs.interface import TIE_TOLERANCE, CostMatrix
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.prompt import common_prefix_blocks
from dynamo.scheduling.router.worker_state import PlacedRequest, WorkerState


class RegretRow:
    """One waiting request with its costs. `at`: its best worker; `regret`: what not getting that
    would cost."""

    __slots__ = ("_second_cost", "_tied", "best_index", "costs", "matrix", "regret", "request")

    def __init__(self, arrival: PendingRequest, prices: CostMatrix, rng: Random) -> None:
        self.request = arrival
        self.matrix = prices
        self.costs = prices.row(arrival)
        self._update_best(rng)

    @property
    def worker(self) -> WorkerState:
        """Its best worker's."""
        return self.matrix.workers[self.best_index]

    def update_cost(self, at: int, cost: float, rng: Random) -> None:
        """One worker costs something else now."""
        before = self.costs[at]
        self.costs[at] = cost
        second = self._second_cost
        if self._tied or at == self.best_index or before <= second or cost <= second:
            self._update_best(rng)

    def _update_best(self, rng: Random) -> None:
        costs = self.costs
        order = sorted(costs)  # quicker than to look for the lowest
        best = order[0]
        self._second_cost = second = order[1] if len(order) > 1 else inf
        self.regret = second - best if second < inf else 0.0
        limit = best + abs(best) * TIE_TOLERANCE
        self._tied = second <= limit
        if self._tied:
            equal = [index for index, cost in enumerate(costs) if cost <= limit]
            self.best_index = equal[int(rng.random() * len(equal))]
        else:
            self.best_index = costs.index(best)


class RegretStep:
    """Requests weighed together: whoever would lose most by not getting its best worker is first.
    Some stand in line, the longest first: of these only the head is weighed with the others, and
    no other has a price."""

    def __init__(
        self,
        others: Sequence[PendingRequest],
        line: Sequence[PendingRequest],
        price: Callable[[PendingRequest], RegretRow],
    ) -> None:
        """`line`: those to which workers differ by their load alone; `price`: what an arrival costs
        at that moment."""
        self._build_row = price
        self._rows = [price(one) for one in others]
        self._queue_head: RegretRow | None = None
        self._set_queue(sorted(line, key=_prompt_tokens, reverse=True)[::-1])

    def pop(self) -> RegretRow | None:
        """Whose turn it is, which leaves; None: nobody is left."""
        rows = self._rows
        if self._queue and self._queue_head not in rows:
            self._next_blocks.pop()
            self._queue_head = self._build_row(self._queue.pop())
            rows.append(self._queue_head)
        if not rows:
            return None
        best = max(rows, key=_regret) if len(rows) > 1 else rows[0]
        rows.remove(best)
        return best

    def on_held(self, row: RegretRow, due: Callable[[PendingRequest], bool]) -> None:
        """It was taken and would rather wait. So would those who stood in line behind it: unless
        they are `due`, they leave."""
        if row is self._queue_head:
            self._set_queue([one for one in self._queue if due(one)])

    def keep_due(self, due: Callable[[PendingRequest], bool]) -> None:
        """The others leave."""
        self._rows = [row for row in self._rows if due(row.request)]
        self._set_queue([one for one in self._queue if due(one)])

    def on_placed(
        self, active: PlacedRequest, blocks: AbstractSet[int], common: CostMatrix, rng: Random
    ) -> None:
        """Its worker has more to do for the others, and will hold what they share with it.
        `blocks`: all that the round brought there; `common`: the prices of all workers, which
        those go by that may go to any."""
        groups: dict[CostMatrix, list[RegretRow]] = {common: []}
        for row in self._rows:
            _extend_overlap(row.request, active)
            groups.setdefault(row.matrix, []).append(row)
        for prices, group in groups.items():
            at = prices.refresh_worker(active.worker)
            if at is not None and group:
                costs = prices.column([row.request for row in group], at)
                for row, cost in zip(group, costs, strict=True):
                    row.update_cost(at, cost, rng)
        if not blocks.isdisjoint(self._next_blocks):
            self._promote_sharers(active)

    def _promote_sharers(self, active: PlacedRequest) -> None:
        """Who begins as the one that went does has a favourite now."""
        line = []
        for one in self._queue:
            if _extend_overlap(one, active):
                self._rows.append(self._build_row(one))
            else:
                line.append(one)
        self._set_queue(line)

    def _set_queue(self, line: list[PendingRequest]) -> None:
        self._queue = line
        self._next_blocks = [_first_uncached_block(one) for one in line]


def _prompt_tokens(arrival: PendingRequest) -> int:
    return arrival.prompt.tokens


def _first_uncached_block(arrival: PendingRequest) -> int | None:
    """The first that nobody holds, if there is one."""
    held, hashes = next(iter(arrival.overlaps.values()), 0), arrival.prompt.hashes
    return hashes[held] if held < len(hashes) else None


_regret = attrgetter("regret")


def _extend_overlap(arrival: PendingRequest, active: PlacedRequest) -> bool:
    """Whether the other one brings its worker more of this prompt, which is noted."""
    name, theirs = active.worker.name, active.hashes
    mine, held = arrival.prompt.hashes, arrival.overlaps.get(name, 0)
    if held < len(mine) and held < len(theirs) and mine[held] == theirs[held]:
        arrival.overlaps[name] = common_prefix_blocks(mine, theirs)
        return True
    return False


def pick_lowest(costs: Sequence[float], rng: Random, tolerance: float = TIE_TOLERANCE) -> int:
    """The lowest; among equals, nearer than `tie` of the best, any."""
    best = min(costs)
    limit = best + abs(best) * tolerance
    equal = [index for index, cost in enumerate(costs) if cost <= limit]
    return equal[0] if len(equal) == 1 else equal[int(rng.random() * len(equal))]
