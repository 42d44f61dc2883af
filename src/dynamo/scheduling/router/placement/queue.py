"""Requests that wait because every worker that could take them is busy: in which order they are
looked at, and how many there may be."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import takewhile
from math import inf
from typing import Generic, Protocol, TypeVar

import msgspec

from dynamo.core.errors import ConfigError, DynamoError, Overloaded
from dynamo.scheduling.router.pending_request import PendingRequest

T = TypeVar("T")

PRIORITY_STEP_S = 1.0
"""What one step of priority is worth where age decides."""
GAP_EWMA_WEIGHT = 0.1
"""Of the newest gap between two departures in their running mean."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0


class QueueOrderable(Protocol):
    """What an order needs to know. `work`: prompt tokens to compute; `deadline_s`: on the clock of
    `arrived_s`; `priority`: higher goes first."""

    @property
    def arrived_s(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...


class QueueOrderKey(msgspec.Struct, frozen=True):
    """That, of what does not tell by itself."""

    arrived_s: float
    prefill_tokens: int = 0
    priority: int = 0
    deadline_s: float = inf


def first_come_first_served(rank: QueueOrderable) -> float:
    """By age; a step of priority counts as a second of it."""
    return rank.arrived_s - PRIORITY_STEP_S * rank.priority


def weighted_shortest_first(rank: QueueOrderable) -> float:
    """Smith's rule: work over weight, which makes the weighted mean wait least."""
    steps = rank.priority
    return (
        rank.prefill_tokens / (1 + steps)
        if steps >= 0
        else float(rank.prefill_tokens * (1 - steps))
    )


def earliest_deadline_first(rank: QueueOrderable) -> float:
    """By deadline; those without one come last, by age."""
    return rank.deadline_s - PRIORITY_STEP_S * rank.priority


QUEUE_ORDERS: dict[str, Callable[[QueueOrderable], float]] = {
    "fcfs": first_come_first_served,
    "shortest": weighted_shortest_first,
    "deadline": earliest_deadline_first,
}

_SortKey = tuple[float, float, int]


class WaitingQueue(Generic[T]):
    """Bounded. Whoever has waited `patience_s` goes before all that have not, oldest first, so that
    no order starves anybody. Times are the caller's: no clock in here."""

    def __init__(self, order: str = "fcfs", bound: int = 1024, starvation_s: float = inf) -> None:
        """`order`: one of `ORDERS`. Raises `ConfigError`."""
        if order not in QUEUE_ORDERS:
            raise ConfigError(
                f"no order is called {order!r}", hint=f"known: {', '.join(QUEUE_ORDERS)}"
            )
        self.sort_key = QUEUE_ORDERS[order]
        self._bound = bound
        self._starvation_s = starvation_s
        self._sorted: list[tuple[_SortKey, str]] = []
        self._entries: dict[str, tuple[_SortKey, QueueOrderable, T]] = {}
        self._count = 0
        self._mean_gap_s = 0.0
        self._last_departure_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def over_bound(self) -> bool:
        """Whether more wait than may."""
        return len(self._entries) > self._bound

    def push(self, name: str, item: T, rank: QueueOrderable, *, bounded: bool = True) -> None:
        """Wait as `name`, which is not there yet. Raises `Overloaded` past the bound."""
        if bounded and len(self._entries) >= self._bound:
            raise self.overload_error()
        self._count += 1
        key = (self.sort_key(rank), rank.arrived_s, self._count)
        insort(self._sorted, (key, name))
        self._entries[name] = (key, rank, item)

    def overload_error(self) -> Overloaded:
        """What is told to whom there is no room for: when a place should be free."""
        return Overloaded(
            f"{self._bound} requests wait for a worker already",
            hint="router.queue_bound is the limit; more workers would take them",
            retry_after_s=self.estimate_wait_s(),
        )

    def count_ahead(self, rank: QueueOrderable) -> int:
        """How many one of that rank would find before it."""
        return bisect_left(
            self._sorted, ((self.sort_key(rank), rank.arrived_s, self._count + 1), "")
        )

    def pop(self, name: str, now: float | None = None) -> T | None:
        """Leave; with `now`, because a worker was found, which tells how fast places become free.
        None for who is not there."""
        found = self._entries.pop(name, None)
        if found is None:
            return None
        key, _, item = found
        del self._sorted[bisect_left(self._sorted, (key, name))]
        if now is not None:
            self._observe_departure(now)
        return item

    def ordered(self, now: float, limit: int | None = None) -> list[T]:
        """The first `most` of those that wait (None: all)."""
        late = self._starving(now)
        if not late:
            return [self._entries[name][2] for _, name in self._sorted[:limit]]
        there = set(late)
        names = late + [name for _, name in self._sorted if name not in there]
        return [self._entries[name][2] for name in names[:limit]]

    def iter_ordered(self, now: float) -> Iterator[T]:
        """All that wait, each looked up when it is asked for: those before it may have left."""
        if self._starving(now):
            return iter(self.ordered(now))
        held = self._entries
        return (held[name][2] for _, name in self._sorted.copy())

    def estimate_wait_s(self) -> float:
        """About how long the last of the queue will wait, as places became free of late."""
        return min(max(len(self._entries) * self._mean_gap_s, RETRY_MIN_S), RETRY_MAX_S)

    def _starving(self, now: float) -> list[str]:
        """They came in order of arrival, and so they stand in the dict."""
        latest = now - self._starvation_s
        late = takewhile(lambda held: held[1][1].arrived_s <= latest, self._entries.items())
        return [name for name, _ in late]

    def _observe_departure(self, now: float) -> None:
        if self._last_departure_s is not None:
            gap_s = now - self._last_departure_s
            self._mean_gap_s += (gap_s - self._mean_gap_s) * (
                GAP_EWMA_WEIGHT if self._mean_gap_s else 1.0
            )
        self._last_departure_s = now


class PendingRequestQueue:
    """Who has just come costs nothing; who is still there after a round of placing stands in
    `queue`, or is refused where that is full."""

    def __init__(self, queue: WaitingQueue[PendingRequest]) -> None:
        self._queue = queue
        self._new: dict[str, PendingRequest] = {}
        self._all: dict[str, PendingRequest] = {}
        self._rejected: list[tuple[PendingRequest, DynamoError]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[PendingRequest]:
        """In order of arrival."""
        return iter(self._all.values())

    def add(self, arrival: PendingRequest) -> None:
        """It waits for the next round."""
        self._new[arrival.id] = self._all[arrival.id] = arrival

    def remove(self, arrival: PendingRequest, now: float | None = None) -> None:
        """It waits no more; `now`: because it got a place. Who is not there: nothing."""
        if self._all.get(arrival.id) is arrival:
            del self._all[arrival.id]
            self._new.pop(arrival.id, None)
            self._queue.pop(arrival.id, now)

    @property
    def new_requests(self) -> Collection[PendingRequest]:
        """Those that have come since the round before."""
        return self._new.values()

    def ordered(self, now: float) -> Iterable[PendingRequest]:
        """All that wait, first comes first, whether there is room for them or not: who finds a
        worker needs none. Who was given may leave before the next is taken."""
        if len(self._queue):
            self._push_new()
            return self._queue.iter_ordered(now)
        fresh = list(self._new.values())
        if len(fresh) > 1:
            fresh.sort(key=self._queue.sort_key)
        return fresh

    def enqueue_new(self) -> None:
        """Whoever is still fresh queues, as far as there is room."""
        self._push_new()
        queue, late = self._queue, []
        while queue.over_bound and self._new:
            late.append(self._new.popitem()[1])
            queue.pop(late[-1].id)
        self._new.clear()
        for arrival in reversed(late):
            del self._all[arrival.id]
            self._rejected.append((arrival, queue.overload_error()))

    def _push_new(self) -> None:
        for arrival in self._new.values():
            if arrival.id not in self._queue:
                self._queue.push(arrival.id, arrival, arrival, bounded=False)

    def reject(self, arrival: PendingRequest, error: DynamoError) -> None:
        """It waits no more, and is told why."""
        self.remove(arrival)
        self._rejected.append((arrival, error))

    def pop_rejected(self) -> list[tuple[PendingRequest, DynamoError]]:
        """Those that were refused since the last call."""
        refused, self._rejected = self._rejected, []
        return refused
