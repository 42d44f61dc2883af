"""One request and its reply over one channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from dynamo_client.network import Channel
from dynamo_client.wire import BrokenReplyError, Head, ReplyReader

Patience = Callable[[], float]
"""Seconds that may pass until the next byte."""


def whole(timeout_s: float) -> Patience:
    """A limit for all of it."""
    end = time.monotonic() + timeout_s
    return lambda: end - time.monotonic()


def gap(timeout_s: float) -> Patience:
    """A limit for each silence."""
    return lambda: timeout_s


class Exchange:
    """Owns the channel until `done` gives it back."""

    def __init__(self, channel: Channel, patience: Patience) -> None:
        self.touched = False
        self._channel = channel
        self._patience = patience
        self._reply = ReplyReader()
        self._early = b""

    async def start(self, request: bytes) -> Head:
        """Send; wait for status and headers. `touched`: at least a byte came back. Raises
        `OSError` and `BrokenReplyError`."""
        # A server may answer, and close, before it has read a request that is too large.
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._channel.send(request, self._left())
        while self._reply.head is None:
            self._early = await self._receive()
        return self._reply.head

    async def more(self) -> bytes:
        """The body's next bytes; b"" at its end."""
        early, self._early = self._early, b""
        while not early and not self._reply.complete:
            early = await self._receive()
        return early

    async def body(self) -> bytes:
        """All that is left of it."""
        parts = []
        while part := await self.more():
            parts.append(part)
        return b"".join(parts)

    async def settle(self, patience_s: float) -> None:
        """Wait shortly for the end of a body whose content is complete."""
        self._patience = gap(patience_s)
        with suppress(OSError, BrokenReplyError):
            await self.more()

    def done(self) -> Channel | None:
        """The channel, if another request may use it; else it is closed."""
        if self._reply.reusable and self._channel.usable():
            return self._channel
        self.close()
        return None

    def close(self) -> None:
        """At once."""
        self._channel.close()

    async def _receive(self) -> bytes:
        data = await self._channel.receive(self._left())
        if data:
            self.touched = True
            return self._reply.feed(data)
        self._reply.end()
        return b""

    def _left(self) -> float:
        left_s = self._patience()
        if left_s <= 0:
            raise TimeoutError
        return left_s
