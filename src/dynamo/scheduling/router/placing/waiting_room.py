"""Requests between their arrival and their place: most pass through at once, the others queue."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from dynamo.core.errors import DynamoError
from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.waiting import WaitingQueue


class WaitingRoom:
    """Who has just come costs nothing; who is still there after a round of placing stands in
    `queue`, or is refused where that is full."""

    def __init__(self, queue: WaitingQueue[Arrival]) -> None:
        self._queue = queue
        self._fresh: dict[str, Arrival] = {}
        self._all: dict[str, Arrival] = {}
        self._refused: list[tuple[Arrival, DynamoError]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Arrival]:
        """In order of arrival."""
        return iter(self._all.values())

    def enter(self, arrival: Arrival) -> None:
        """It waits for the next round."""
        self._fresh[arrival.id] = self._all[arrival.id] = arrival

    def leave(self, arrival: Arrival, now: float | None = None) -> None:
        """It waits no more; `now`: because it got a place. Who is not there: nothing."""
        if self._all.get(arrival.id) is arrival:
            del self._all[arrival.id]
            self._fresh.pop(arrival.id, None)
            self._queue.pop(arrival.id, now)

    @property
    def fresh(self) -> Collection[Arrival]:
        """Those that have come since the round before."""
        return self._fresh.values()

    def in_order(self, now: float) -> Iterable[Arrival]:
        """All that wait, first comes first, whether there is room for them or not: who finds a
        worker needs none. Who was given may leave before the next is taken."""
        if len(self._queue):
            self._line_up()
            return self._queue.in_turn(now)
        fresh = list(self._fresh.values())
        if len(fresh) > 1:
            fresh.sort(key=self._queue.place)
        return fresh

    def settle(self) -> None:
        """Whoever is still fresh queues, as far as there is room."""
        self._line_up()
        queue, late = self._queue, []
        while queue.over and self._fresh:
            late.append(self._fresh.popitem()[1])
            queue.pop(late[-1].id)
        self._fresh.clear()
        for arrival in reversed(late):
            del self._all[arrival.id]
            self._refused.append((arrival, queue.full()))

    def _line_up(self) -> None:
        for arrival in self._fresh.values():
            if arrival.id not in self._queue:
                self._queue.push(arrival.id, arrival, arrival, bounded=False)

    def refuse(self, arrival: Arrival, error: DynamoError) -> None:
        """It waits no more, and is told why."""
        self.leave(arrival)
        self._refused.append((arrival, error))

    def take_refused(self) -> list[tuple[Arrival, DynamoError]]:
        """Those that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused
