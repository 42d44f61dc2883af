"""Writes leave once a turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Flushable(Protocol):
    """Something with bytes to send."""

    write: Callable[[bytes], None]
    paused_at: float | None
    closing: bool

    def pop_output(self) -> bytes:
        """What is to be sent now; may be nothing."""

    def on_written(self) -> None:
        """It was handed over. Called where output is paused or the end has come."""


class ConnectionFlusher:
    """Flushes every armed connection in one callback, after all that is ready in this turn has
    run: uvloop's `transport.write` sends at once, so joining comes first.

    All is prepared before the first byte is sent: the kernel's send path leaves the processor's
    caches cold, and preparing in between would pay for that once a token. To arm a connection is to
    append it to `due`, once a flush, and to call `wake` where it is the first.
    """

    __slots__ = ("_loop", "queue")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: list[Flushable] = []

    def schedule(self) -> None:
        """Flush at the end of this turn."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        armed = self.queue[:]
        self.queue.clear()
        ready = [(connection.write, connection.pop_output()) for connection in armed]
        for write, data in ready:
            if data:
                write(data)
        for connection in armed:
            if connection.closing or connection.paused_at is not None:
                connection.on_written()
