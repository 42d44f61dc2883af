"""The load reports of the workers of a fast replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from dynamo.core.values import Load, sum_loads
from dynamo.inference.load_publisher import LOAD_INTERVAL_S
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.worker import FastWorker


class LoadReports:
    """Publishes loads as `LoadPublisher` does: at a request after idle time, and from then on every
    `LOAD_INTERVAL_S` until the worker is idle again. `publish` gets them."""

    def __init__(
        self, heap: EventHeap, transfer: float | None, publish: Callable[[str, Load], None]
    ) -> None:
        self._heap, self._transfer, self._publish = heap, transfer or 0.0, publish
        self._published: dict[str, Load] = {}
        self._changed: set[str] = set()
        self._idle: set[str] = set()

    def start(self, worker: str, ranks: Sequence[FastWorker]) -> None:
        """Publish the loads of a worker with these ranks."""
        self._heap.call_at(self._heap.time_s, partial(self._report, worker, ranks))

    def on_request(self, worker: str, ranks: Sequence[FastWorker]) -> None:
        """Publish soon, because a request has arrived at a worker."""
        if worker in self._idle:
            self._idle.discard(worker)
            self._heap.soon.append(partial(self._report, worker, ranks))
        else:
            self._changed.add(worker)

    def _report(self, worker: str, ranks: Sequence[FastWorker]) -> None:
        if ranks[0].stopped:
            return
        self._changed.discard(worker)
        now = self._heap.time_s
        loads = tuple(rank.report_load(now, self._transfer) for rank in ranks)
        load = loads[0] if len(loads) == 1 else replace(sum_loads(loads), ranks=loads)
        if load != self._published.get(worker):
            self._published[worker] = load
            self._publish(worker, load)
        idle = not load.running + load.waiting
        self._heap.call_at(now + LOAD_INTERVAL_S, partial(self._on_due, worker, ranks, idle=idle))

    def _on_due(self, worker: str, ranks: Sequence[FastWorker], *, idle: bool) -> None:
        if idle and worker not in self._changed:
            self._idle.add(worker)
        else:
            self._report(worker, ranks)
