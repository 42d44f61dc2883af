"""The heap of a fast replay: what happens at which virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import ParamSpec, TypeVar

from dynamo.core.clock import Clock
from dynamo.operations.replay.fast.worker import FastWorker

P = ParamSpec("P")
T = TypeVar("T")


class EventHeap(Clock):
    """Virtual time without an event loop. At each instant first all that is due runs, then what it
    has put into `soon`, then idle workers begin a step. A worker with work begins its next step at
    once: a request that is sent because the last one has ended misses it."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.stopped = False
        self.soon: list[Callable[[], None]] = []
        self.idle: list[FastWorker] = []
        self._heap: list[tuple[float, int, FastWorker | None, int, Callable[[], None] | None]] = []
        self._next = count().__next__

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    async def sleep_until(self, when: float) -> None:
        raise NotImplementedError

    async def offload(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError

    def wake(self, worker: FastWorker, when: float) -> None:
        """Wake a worker at a time, instead of when it was to be woken before."""
        worker.wakes += 1
        heappush(self._heap, (when, self._next(), worker, worker.wakes, None))

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at a time. The returned canceller does nothing."""
        when = self.time_s + max(0.0, when - self.time_s)  # rounded as on an event loop
        heappush(self._heap, (when, self._next(), None, 0, callback))
        return _do_nothing

    def run(self) -> None:
        """Run until nothing is left to happen, or somebody has set `stopped`."""
        heap, idle, pop = self._heap, self.idle, heappop
        while heap and not self.stopped:
            self.time_s = now = heap[0][0]
            while heap and heap[0][0] <= now:
                _, _, worker, wakes, callback = pop(heap)
                if worker is None:
                    callback()  # type: ignore[misc]
                elif worker.wakes == wakes:
                    worker.on_wake(now)
                    if has_work := worker.running or worker.waiting:
                        worker.begin(now)
                    if not worker.is_busy and (has_work or worker.arriving):
                        idle.append(worker)
            while self.soon:
                soon, self.soon = self.soon, []
                for call in soon:
                    call()
            if idle:
                for worker in idle:
                    if not worker.is_busy:
                        worker.begin(now)
                idle.clear()


def _do_nothing() -> None:
    """Cancel no event."""
