"""Requests that wait because every worker that could take them is busy: in which order they are
looked at, and how many there may be."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import takewhile
from math import inf
from typing import Generic, Protocol, TypeVar

import msgspec

from dynamo.core.errors import ConfigError, Overloaded

T = TypeVar("T")

HEAD_START_S = 1.0
"""What one step of priority is worth where age decides."""
GAP_WEIGHT = 0.1
"""Of the newest gap between two departures in their running mean."""
RETRY_LEAST_S, RETRY_MOST_S = 1.0, 60.0


class Ranked(Protocol):
    """What an order needs to know. `work`: prompt tokens to compute; `deadline_s`: on the clock of
    `arrived_s`; `priority`: higher goes first."""

    @property
    def arrived_s(self) -> float: ...
    @property
    def work(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...


class Rank(msgspec.Struct, frozen=True):
    """That, of what does not tell by itself."""

    arrived_s: float
    work: int = 0
    priority: int = 0
    deadline_s: float = inf


def first_come(rank: Ranked) -> float:
    """By age; a step of priority counts as a second of it."""
    return rank.arrived_s - HEAD_START_S * rank.priority


def shortest_weighted(rank: Ranked) -> float:
    """Smith's rule: work over weight, which makes the weighted mean wait least."""
    steps = rank.priority
    return rank.work / (1 + steps) if steps >= 0 else float(rank.work * (1 - steps))


def earliest_deadline(rank: Ranked) -> float:
    """By deadline; those without one come last, by age."""
    return rank.deadline_s - HEAD_START_S * rank.priority


ORDERS: dict[str, Callable[[Ranked], float]] = {
    "fcfs": first_come,
    "shortest": shortest_weighted,
    "deadline": earliest_deadline,
}

_Key = tuple[float, float, int]


class WaitingQueue(Generic[T]):
    """Bounded. Whoever has waited `patience_s` goes before all that have not, oldest first, so that
    no order starves anybody. Times are the caller's: no clock in here."""

    def __init__(self, order: str = "fcfs", bound: int = 1024, patience_s: float = inf) -> None:
        """`order`: one of `ORDERS`. Raises `ConfigError`."""
        if order not in ORDERS:
            raise ConfigError(f"no order is called {order!r}", hint=f"known: {', '.join(ORDERS)}")
        self.place = ORDERS[order]
        self._bound = bound
        self._patience_s = patience_s
        self._sorted: list[tuple[_Key, str]] = []
        self._held: dict[str, tuple[_Key, Ranked, T]] = {}
        self._count = 0
        self._gap_s = 0.0
        self._left_s: float | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def over(self) -> bool:
        """Whether more wait than may."""
        return len(self._held) > self._bound

    def push(self, name: str, item: T, rank: Ranked, *, bounded: bool = True) -> None:
        """Wait as `name`, which is not there yet. Raises `Overloaded` past the bound."""
        if bounded and len(self._held) >= self._bound:
            raise self.full()
        self._count += 1
        key = (self.place(rank), rank.arrived_s, self._count)
        insort(self._sorted, (key, name))
        self._held[name] = (key, rank, item)

    def full(self) -> Overloaded:
        """What is told to whom there is no room for: when a place should be free."""
        return Overloaded(
            f"{self._bound} requests wait for a worker already",
            hint="router.queue_bound is the limit; more workers would take them",
            retry_after_s=self.wait_s(),
        )

    def ahead(self, rank: Ranked) -> int:
        """How many one of that rank would find before it."""
        return bisect_left(self._sorted, ((self.place(rank), rank.arrived_s, self._count + 1), ""))

    def pop(self, name: str, now: float | None = None) -> T | None:
        """Leave; with `now`, because a worker was found, which tells how fast places become free.
        None for who is not there."""
        found = self._held.pop(name, None)
        if found is None:
            return None
        key, _, item = found
        del self._sorted[bisect_left(self._sorted, (key, name))]
        if now is not None:
            self._departed(now)
        return item

    def in_order(self, now: float, most: int | None = None) -> list[T]:
        """The first `most` of those that wait (None: all)."""
        late = self._late(now)
        if not late:
            return [self._held[name][2] for _, name in self._sorted[:most]]
        there = set(late)
        names = late + [name for _, name in self._sorted if name not in there]
        return [self._held[name][2] for name in names[:most]]

    def in_turn(self, now: float) -> Iterator[T]:
        """All that wait, each looked up when it is asked for: those before it may have left."""
        if self._late(now):
            return iter(self.in_order(now))
        held = self._held
        return (held[name][2] for _, name in self._sorted.copy())

    def wait_s(self) -> float:
        """About how long the last of the queue will wait, as places became free of late."""
        return min(max(len(self._held) * self._gap_s, RETRY_LEAST_S), RETRY_MOST_S)

    def _late(self, now: float) -> list[str]:
        """They came in order of arrival, and so they stand in the dict."""
        latest = now - self._patience_s
        late = takewhile(lambda held: held[1][1].arrived_s <= latest, self._held.items())
        return [name for name, _ in late]

    def _departed(self, now: float) -> None:
        if self._left_s is not None:
            gap_s = now - self._left_s
            self._gap_s += (gap_s - self._gap_s) * (GAP_WEIGHT if self._gap_s else 1.0)
        self._left_s = now
