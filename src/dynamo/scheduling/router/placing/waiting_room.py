"""Requests between their arrival and their place: most pass through at once, the others queue."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from dynamo.core.errors import DynamoError
from dynamo.scheduling.router.placing.arrival import PendingRequest
from dynamo.scheduling.router.placing.waiting import WaitingQueue


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
