"""Publishes the load of an engine: on change, at most once in `LOAD_INTERVAL_S`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from dynamo.communication.events import EventSource
from dynamo.core.clock import Clock
from dynamo.core.reply import Engine
from dynamo.core.values import Load

LOAD_INTERVAL_S = 0.1

encode_load = msgspec.msgpack.Encoder().encode


class LoadPublisher:
    """Publishes the engine's `Load` in msgpack whenever it differs from the last one. While the
    engine is idle it waits for `on_load_changed`."""

    def __init__(
        self,
        engine: Engine,
        source: EventSource,
        clock: Clock,
        pauses: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`pauses`: those of the event loop, (Unix time of the end, seconds)."""
        self._engine, self._pauses = engine, pauses
        self._source = source
        self._clock = clock
        self._load_changed = asyncio.Event()

    def on_load_changed(self) -> None:
        """Wake the publisher because a request has arrived or ended."""
        self._load_changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        published: Load | None = None
        while True:
            load = self._engine.report_load()
            if self._pauses:
                load = msgspec.structs.replace(load, last_pause=self._pauses[-1])
            if load != published:
                published = load
                self._source.publish(encode_load(load))
            await self._clock.sleep(LOAD_INTERVAL_S)
            if not load.running + load.waiting:
                await self._load_changed.wait()
            self._load_changed.clear()
