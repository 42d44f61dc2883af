"""The stream of a console: a deployment as a whole, then what changes, encoded once for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from dynamo.application.exchange import Exchange

KEYED = ("processes", "workers")
"""Parts of a deployment that are mappings. Of these, only entries that differ are sent."""

State = Mapping[str, Any]
_encode = msgspec.json.Encoder().encode


class DeploymentStream:
    """Sends the deployment that `read` returns to all viewers."""

    def __init__(self, read: Callable[[], Awaitable[State]]) -> None:
        self._read = read
        self._state: State = {}
        self._whole = b""
        self._viewers: dict[Exchange, asyncio.Event] = {}

    async def serve(self, exchange: Exchange, own: State) -> None:
        """Send events until the client leaves, or has not read for long (`server.stall_s` or
        `server.stream_backlog_bytes`). `own`: what only this client gets."""
        if not self._viewers:
            state = await self._read()
            if not self._viewers:
                self._state, self._whole = state, b""
        self._whole = self._whole or _event(self._state)
        exchange.start_stream("")
        exchange.response.write(_event(own))
        exchange.response.write(self._whole)
        left = self._viewers[exchange] = asyncio.Event()
        try:
            await left.wait()
        finally:
            self._viewers.pop(exchange, None)

    async def update(self) -> None:
        """Send what has changed, if there are viewers. Called once a second."""
        if not self._viewers:
            return
        state = await self._read()
        event = _event(find_changes(self._state, state))
        self._state, self._whole = state, b""
        for exchange, left in list(self._viewers.items()):
            if not exchange.response.write(event):
                left.set()

    async def close(self) -> None:
        """End all streams, so that the server need not wait for them."""
        for exchange, left in list(self._viewers.items()):
            exchange.response.end()
            left.set()


def find_changes(before: State, after: State) -> State:
    """Return the parts that differ. Entries of `KEYED` parts that have gone are None."""
    changes: dict[str, Any] = {}
    for name, value in after.items():
        old = before.get(name)
        if name in KEYED and old is not None:
            changed = {key: each for key, each in value.items() if old.get(key) != each}
            if changed := changed | dict.fromkeys(old.keys() - value.keys()):
                changes[name] = changed
        elif old != value:
            changes[name] = value
    return changes


def _event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"
