"""Tells whoever listens what the engine does: on change, at most so often."""

from __future__ import annotations

import asyncio

import msgspec

from dynamo.communication.events import Source
from dynamo.core.clock import Clock
from dynamo.core.reply import Engine
from dynamo.core.values import Load

INTERVAL_S = 0.1

encode_load = msgspec.msgpack.Encoder().encode


class LoadReport:
    """Publishes the engine's `Load` (msgpack) whenever it differs from the last one published. It
    sleeps while nothing happens: `touch` says that a request came or went."""

    def __init__(self, engine: Engine, source: Source, clock: Clock) -> None:
        self._engine = engine
        self._source = source
        self._clock = clock
        self._touched = asyncio.Event()
        self._last: Load | None = None

    def touch(self) -> None:
        """Something changed."""
        self._touched.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._publish()
            await self._clock.sleep(INTERVAL_S)
            if self._last is None or not (self._last.running or self._last.waiting):
                await self._touched.wait()
            self._touched.clear()

    def _publish(self) -> None:
        load = self._engine.load()
        if load != self._last:
            self._last = load
            self._source.publish(encode_load(load))
