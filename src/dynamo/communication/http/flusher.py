"""Writes leave once a turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Flushable(Protocol):
    """Something with bytes to send."""

    def flush(self) -> None:
        """Send them."""


class Flusher:
    """Flushes every armed connection in one callback, after all that is ready in this turn has
    run: uvloop's `transport.write` sends at once, so joining comes first."""

    __slots__ = ("_armed", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._armed: list[Flushable] = []

    def arm(self, connection: Flushable) -> None:
        """Flush `connection` soon. Arm it once per flush."""
        armed = self._armed
        if not armed:
            self._loop.call_soon(self._flush)
        armed.append(connection)

    def _flush(self) -> None:
        armed, self._armed = self._armed, []
        for connection in armed:
            connection.flush()
