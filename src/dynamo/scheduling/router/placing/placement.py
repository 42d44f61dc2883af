"""Who goes where, and who waits a moment: pure and synchronous, so that the router of a frontend,
one of its own and the simulator share it.

Joint placement by regret: of all that wait, the one that would lose most by not getting its best
worker goes first, then the costs are looked at again. Source: the regret heuristic for generalised
assignment (Martello and Toth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from random import Random
from typing import Protocol

import msgspec

from dynamo.core.errors import DynamoError
from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.costs import Cost
from dynamo.scheduling.router.placing.fleet import Active, Book, Fleet
from dynamo.scheduling.router.placing.prices import Prices
from dynamo.scheduling.router.placing.waiting import WaitingQueue
from dynamo.scheduling.router.placing.waiting_room import WaitingRoom
from dynamo.scheduling.router.placing.window import Row, Window, lowest
from dynamo.scheduling.router.policy import Candidate

WINDOW = 12
"""Requests that are weighed together: the cost of that grows with the square of them."""

ROUND_PAIRS = 4_096
"""(Request, worker) pairs that one round looks at; later arrivals wait their turn."""

UNBOUND = 1 << 30
LOOK_AGAIN_S = 0.05
"""After a round that left somebody waiting who was due: what frees a worker is heard anyway."""

TOGETHER = 0.25
"""Share of a worker's step that prompts may fill before those that come next are held back."""

SHORT = 512
"""Tokens up to which a prompt is short: a better choice would gain it little."""


class View(Protocol):
    """What is known of the workers' caches."""

    def overlaps(self, hashes: Sequence[int]) -> dict[str, int]:
        """Worker -> leading blocks of the prompt that it holds, or soon will."""

    def routed(self, worker: str, hashes: Sequence[int]) -> None:
        """A prompt goes to `worker`."""

    def settled(self, worker: str, hashes: Sequence[int]) -> None:
        """The first token of a prompt that went there came, or never will."""

    def mode(self, worker: str) -> str:
        """How that worker's cache is known."""

    def cacheless(self, workers: AbstractSet[str]) -> None:
        """These workers keep nothing for later prompts."""


class Patience(msgspec.Struct, frozen=True):
    """A request whose best worker has more than `backlog_s` of prefill before it stays in the
    router, for at most `longest_s`: elsewhere may become better, and nothing is lost before the
    worker is nearly free. `refresh_s`: how old a look at the caches may be."""

    backlog_s: float = 0.05
    longest_s: float = 3.0
    refresh_s: float = 0.1


class Placed(msgspec.Struct, frozen=True):
    """A request and where it goes."""

    arrival: Arrival
    active: Active
    table: Sequence[Candidate]
    candidates: int


Select = Callable[[Arrival, Sequence[Book], Sequence[float], Random], int]
"""(Request, its workers, their costs, chance) -> the index of the one to take. Raises DynamoError
where none will do."""


class Placement:
    """Owns what waits; places it on `fleet`."""

    def __init__(
        self,
        fleet: Fleet,
        view: View,
        cost: Cost,
        rng: Random,
        *,
        select: Select | None = None,
        patience: Patience | None = None,
        queue: WaitingQueue[Arrival] | None = None,
        threshold: float = 0.0,
    ) -> None:
        """`select`: instead of the lowest cost, for each by itself; `queue`: of those that must
        wait (first come, without bound); `threshold`: a worker whose open prompts are more than so
        many of its steps gets nothing while all are so (0: never)."""
        self.fleet = fleet
        self.view = view
        self.cost = cost
        self._rng = rng
        self._select = select
        self._patience = patience or Patience()
        self._threshold = threshold
        self._brought: dict[str, set[int]] = {}
        self._waiting = WaitingRoom(WaitingQueue(bound=UNBOUND) if queue is None else queue)

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, arrival: Arrival) -> None:
        """Wait for `place`."""
        arrival.overlaps = self.view.overlaps(arrival.prompt.hashes)
        self._waiting.enter(arrival)

    def withdraw(self, arrival: Arrival) -> None:
        """It does not want to be placed any more."""
        self._waiting.leave(arrival)

    def refused(self) -> list[tuple[Arrival, DynamoError]]:
        """Those for whom there is no room to wait, or no worker by the selector, since the last
        call."""
        return self._waiting.take_refused()

    def stranded(self) -> list[Arrival]:
        """Those for whom no worker is left; they wait no more."""
        books = self.fleet.books
        lost = [
            one
            for one in self._waiting
            if not books or (one.barred and all(book.instance.id in one.barred for book in books))
        ]
        for one in lost:
            self._waiting.leave(one)
        return lost

    def place(self, now: float) -> list[Placed]:
        """All that may go now, in the order in which they go."""
        books = self.fleet.books
        if not books or not any(map(self._eligible, self._waiting)):
            return []
        self.fleet.freshen(now)
        self._brought.clear()
        joint = self.cost.joint and self._select is None and not self._threshold
        patient = joint or (self.cost.joint and self._threshold)
        if patient and not (self._some_free(now) or self._overdue(next(iter(self._waiting)), now)):
            self._waiting.settle()
            return []
        waiting = self._waiting.in_order(now)
        waiting = self._hopeful(waiting, now) if patient else filter(self._eligible, waiting)
        prices = self.cost.prices(books, now)
        if joint:
            placed = self._jointly(waiting, prices, now)
        elif self._threshold:
            placed = self._in_turn(waiting, prices, now)
        else:
            placed = [done for one in waiting if (done := self._alone(one, prices, now))]
        self._waiting.settle()
        return placed

    def first_token(self, active: Active, now: float) -> None:
        """The prompt is computed."""
        active.book.first_token(active, now)
        self.view.settled(active.book.name, active.hashes)

    def ended(self, active: Active, now: float) -> None:
        """The request left its worker."""
        if active.first_s is None:
            self.view.settled(active.book.name, active.hashes)
        self.cost.ended(active)
        active.book.end(active, now)

    def next_due(self, now: float) -> float | None:
        """When `place` should be called again if nothing happens before; None: never."""
        if not len(self._waiting):
            return None
        patience = self._patience
        oldest = next(iter(self._waiting)).arrived_s
        due = oldest + patience.longest_s
        for book in self.fleet.books:
            if book.open_count and now < (at := book.free_s - patience.backlog_s) < due:
                due = at
        return due if due > now else now + LOOK_AGAIN_S

    def _eligible(self, arrival: Arrival) -> bool:
        return not arrival.barred or any(
            book.instance.id not in arrival.barred for book in self.fleet.books
        )

    def _hopeful(self, waiting: Iterable[Arrival], now: float) -> Iterator[Arrival]:
        """Those that may go somewhere where a worker is nearly free, or must not wait longer: who
        may only go where all are busy holds up nobody else."""
        free: dict[AbstractSet[str], bool] = {}
        for one in waiting:
            hope = free.get(one.barred)
            if hope is None:
                hope = any(self._nearly_free(book, now) for book in self._books_for(one))
                free[one.barred] = hope
            if hope or (self._overdue(one, now) and self._eligible(one)):
                yield one

    def _in_turn(self, waiting: Iterable[Arrival], prices: Prices, now: float) -> list[Placed]:
        """While a worker is below the threshold, whoever is first. Who must not go to those that
        are stays, and the next is looked at."""
        placed: list[Placed] = []
        for one in islice(waiting, max(1, ROUND_PAIRS // len(prices.books))):
            if self._all_busy(self.fleet.books):
                break
            if one.barred and self._all_busy(self._books_for(one)):
                continue
            if self.cost.joint and self._better_wait(self._row(one, prices, now), now):
                continue
            if done := self._alone(one, prices, now):
                placed.append(done)
        return placed

    def _all_busy(self, books: Sequence[Book]) -> bool:
        """Each has more before it than it may."""
        limit = self._threshold
        return all(book.open_tokens > limit * book.token_budget for book in books)

    def _books_for(self, arrival: Arrival) -> list[Book]:
        books, barred = self.fleet.books, arrival.barred
        return [book for book in books if book.instance.id not in barred] if barred else books

    def _alone(self, arrival: Arrival, common: Prices, now: float) -> Placed | None:
        self._look(arrival, now)
        prices = self._prices_for(arrival, common, now)
        costs = prices.row(arrival)
        if self._select is None:
            at = lowest(costs, self._rng, self.cost.tie)
        else:
            try:
                at = self._select(arrival, prices.books, costs, self._rng)
            except DynamoError as error:
                self._waiting.refuse(arrival, error)
                return None
        placed = self._go(arrival, prices, costs, at, now)
        common.moved(placed.active.book)
        return placed

    def _jointly(self, waiting: Iterable[Arrival], prices: Prices, now: float) -> list[Placed]:
        most = max(1, ROUND_PAIRS // len(prices.books))
        waiting = islice(waiting, most)
        placed: list[Placed] = []
        weighed: set[str] = set()
        while window := list(islice(waiting, WINDOW)):
            gone = self._window(self._may_go(window, now), prices, now)
            placed += gone
            keen = bool(gone or not weighed)
            weighed.update(one.id for one in window)
            if not keen:
                break  # a dozen who would rather wait: so would those behind them, last time
        return placed + self._newcomers(weighed, most, prices, now)

    def _newcomers(
        self, weighed: AbstractSet[str], most: int, prices: Prices, now: float
    ) -> list[Placed]:
        """Who has just come and was not `weighed` may want another worker than those before."""
        new = (one for one in self._waiting.fresh if one.id not in weighed and self._eligible(one))
        found = list(islice(new, most))
        placed: list[Placed] = []
        for start in range(0, len(found), WINDOW):
            window = self._may_go(found[start : start + WINDOW], now)
            placed += self._window(window, prices, now)
        return placed

    def _window(self, waiting: list[Arrival], common: Prices, now: float) -> list[Placed]:
        """Those weighed together."""

        def overdue(arrival: Arrival) -> bool:
            return self._overdue(arrival, now)

        window = self._weighed(waiting, common, now)
        placed: list[Placed] = []
        while (best := window.take()) is not None:
            if self._better_wait(best, now):
                window.stays(best, overdue)
                continue
            done = self._go(best.arrival, best.prices, best.costs, best.at, now)
            placed.append(done)
            book = done.active.book
            if not (self._nearly_free(book, now) or self._some_free(now)):
                window.keep(overdue)
            window.went(done.active, self._brought[book.name], common, self._rng)
        return placed

    def _weighed(self, waiting: list[Arrival], common: Prices, now: float) -> Window:
        """Short prompts of which all workers hold the same stand in line."""
        workers = len(common.books)
        line: list[Arrival] = []
        others: list[Arrival] = []
        for one in waiting:
            held = None if one.barred else one.held_by_all(workers)
            if held is not None and one.prompt.tokens - held * one.block_tokens <= SHORT:
                line.append(one)
            else:
                others.append(one)
        return Window(others, line, lambda one: self._row(one, common, now))

    def _may_go(self, waiting: list[Arrival], now: float) -> list[Arrival]:
        """Those whom a round may place. Most rounds end here."""
        if self._some_free(now):
            return waiting
        return [one for one in waiting if self._overdue(one, now)]

    def _some_free(self, now: float) -> bool:
        """A worker is nearly done with the prompts before it."""
        return any(self._nearly_free(book, now) for book in self.fleet.books)

    def _nearly_free(self, book: Book, now: float) -> bool:
        """Little is before it in time, or all of it goes into its next step: into a part of that,
        or into all of it where the prompts are short."""
        tokens, step = book.open_tokens, book.token_budget
        return (
            tokens <= step * TOGETHER
            or tokens <= min(step, SHORT * book.open_count)
            or book.backlog_ms(now) <= self._patience.backlog_s * 1e3
        )

    def _overdue(self, arrival: Arrival, now: float) -> bool:
        return now - arrival.arrived_s >= self._patience.longest_s

    def _row(self, arrival: Arrival, common: Prices, now: float) -> Row:
        self._look(arrival, now)
        return Row(arrival, self._prices_for(arrival, common, now), self._rng)

    def _look(self, arrival: Arrival, now: float) -> None:
        """At the caches again, where that was long ago or this round brought a worker more of the
        prompt."""
        late = now - arrival.looked_s > self._patience.refresh_s
        if late or self._brings_more(arrival):
            arrival.looked_s = now
            arrival.overlaps = self.view.overlaps(arrival.prompt.hashes)

    def _brings_more(self, arrival: Arrival) -> bool:
        mine, held = arrival.prompt.hashes, arrival.overlaps.get
        for worker, blocks in self._brought.items():
            depth = held(worker, 0)
            if depth < len(mine) and mine[depth] in blocks:
                return True
        return False

    def _prices_for(self, arrival: Arrival, common: Prices, now: float) -> Prices:
        return self.cost.prices(self._books_for(arrival), now) if arrival.barred else common

    def _better_wait(self, row: Row, now: float) -> bool:
        return not (self._nearly_free(row.book, now) or self._overdue(row.arrival, now))

    def _go(
        self, arrival: Arrival, prices: Prices, costs: Sequence[float], at: int, now: float
    ) -> Placed:
        book = prices.books[at]
        table = prices.table(arrival, costs, at)
        active = Active(arrival.id, book, arrival.prompt, arrival.new_tokens(book.name), now)
        book.place(active, now)
        self.cost.placed(active)
        self.view.routed(book.name, arrival.prompt.hashes)
        self._brought.setdefault(book.name, set()).update(arrival.prompt.hashes)
        self._waiting.leave(arrival, now)
        return Placed(arrival, active, table, len(prices.books))
