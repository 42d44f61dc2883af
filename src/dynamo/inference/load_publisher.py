"""Publishes the load of an engine: on change, at most once in `LOAD_INTERVAL_S`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo.communication.events import EventSource
from dynamo.core.clock import Clock
from dynamo.core.reply import Engine
from dynamo.core.values import Load

LOAD_INTERVAL_S = 0.1
CORE_WAIT_INTERVAL_S = 0.5

encode_load = msgspec.msgpack.Encoder().encode


class CoreWait:
    """Sums up how long threads of this process were ready to run, but had no core. Of each interval
    between two calls of `measure`, the wait of the thread counts that waited longest. A call costs
    20 us of CPU for each thread."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """`tasks`: the folder of the process's threads; without it, the sum stays 0."""
        self._tasks = tasks
        self._waited_ns: dict[str, int] = {}
        self._total_s = 0.0

    def measure(self) -> float:
        """Return the sum in seconds, in hundredths."""
        waited_ns: dict[str, int] = {}
        with suppress(OSError):
            for thread in os.listdir(self._tasks):  # noqa: PTH208 - names are enough
                with suppress(OSError, ValueError, IndexError):  # the thread has ended
                    text = (self._tasks / thread / "schedstat").read_text()
                    waited_ns[thread] = int(text.split()[1])
        before = self._waited_ns
        longest_ns = max(
            (ns - before.get(thread, ns) for thread, ns in waited_ns.items()), default=0
        )
        self._waited_ns = waited_ns
        self._total_s += longest_ns / 1e9
        return round(self._total_s, 2)


class LoadPublisher:
    """Publishes the engine's `Load` in msgpack whenever it differs from the last one. While the
    engine is idle it waits for `on_load_changed`."""

    def __init__(
        self,
        engine: Engine,
        source: EventSource,
        clock: Clock,
        pauses: Sequence[tuple[float, float]] = (),
        core_wait: Callable[[], float] | None = None,
    ) -> None:
        """`pauses`: those of the event loop, (Unix time of the end, seconds). `core_wait` returns
        `Load.core_wait_s`. None: the clock is virtual, and a wait in real time means nothing."""
        self._engine, self._pauses, self._core_wait = engine, pauses, core_wait
        self._source = source
        self._clock = clock
        self._load_changed = asyncio.Event()

    def on_load_changed(self) -> None:
        """Wake the publisher because a request has arrived or ended."""
        self._load_changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        published: Load | None = None
        wait_s, measured_s = 0.0, -CORE_WAIT_INTERVAL_S
        while True:
            load = self._engine.report_load()
            now = self._clock.now()
            if self._core_wait is not None and now >= measured_s + CORE_WAIT_INTERVAL_S:
                wait_s, measured_s = self._core_wait(), now
            if wait_s:
                load = msgspec.structs.replace(load, core_wait_s=wait_s)
            if self._pauses:
                load = msgspec.structs.replace(load, last_pause=self._pauses[-1])
            if load != published:
                published = load
                self._source.publish(encode_load(load))
            await self._clock.sleep(LOAD_INTERVAL_S)
            if not load.running + load.waiting:
                await self._load_changed.wait()
            self._load_changed.clear()
