"""Writes all HTTP connections once per loop iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Flushable(Protocol):
    """A connection with bytes to send."""

    write: Callable[[bytes], None]
    paused_at: float | None
    closing: bool

    def pop_output(self) -> bytes:
        """Return the bytes to send now, which may be none."""

    def on_written(self) -> None:
        """Continue after the write. Called if writing is paused or the connection is closing."""


class ConnectionFlusher:
    """Flushes every queued connection in one callback at the end of the loop iteration.

    uvloop's `transport.write` sends at once, so output is joined first. All output is prepared
    before the first byte is sent, because the kernel's send path evicts the CPU's caches: preparing
    in between would cost that once per token. A connection appends itself to `queue`, at most once
    per flush. The first one calls `schedule`.
    """

    __slots__ = ("_loop", "queue")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: list[Flushable] = []

    def schedule(self) -> None:
        """Flush after all callbacks that are ready in this loop iteration."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        queued = self.queue[:]
        self.queue.clear()
        ready = [(connection.write, connection.pop_output()) for connection in queued]
        for write, data in ready:
            if data:
                write(data)
        for connection in queued:
            if connection.closing or connection.paused_at is not None:
                connection.on_written()
