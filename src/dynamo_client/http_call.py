"""One request and its reply over one channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from dynamo_client.http1 import MalformedResponseError, ResponseHead, ResponseParser
from dynamo_client.network import Channel

RemainingTime = Callable[[], float]
"""Seconds that may pass until the next byte."""


def total_timeout(timeout_s: float) -> RemainingTime:
    """A limit for all of it."""
    end = time.monotonic() + timeout_s
    return lambda: end - time.monotonic()


def idle_timeout(timeout_s: float) -> RemainingTime:
    """A limit for each silence."""
    return lambda: timeout_s


class HttpCall:
    """Owns the channel until `done` gives it back."""

    def __init__(self, channel: Channel, patience: RemainingTime) -> None:
        self.response_started = False
        self._channel = channel
        self._remaining_time = patience
        self._parser = ResponseParser()
        self._buffered_body = b""

    async def start(self, request: bytes) -> ResponseHead:
        """Send; wait for status and headers. `touched`: at least a byte came back. Raises
        `OSError` and `BrokenReplyError`."""
        # A server may answer, and close, before it has read a request that is too large.
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._channel.send(request, self._remaining_s())
        while self._parser.head is None:
            self._buffered_body = await self._receive()
        return self._parser.head

    async def read(self) -> bytes:
        """The body's next bytes; b"" at its end."""
        early, self._buffered_body = self._buffered_body, b""
        while not early and not self._parser.complete:
            early = await self._receive()
        return early

    async def read_body(self) -> bytes:
        """All that is left of it."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def drain(self, patience_s: float) -> None:
        """Wait shortly for the end of a body whose content is complete."""
        self._remaining_time = idle_timeout(patience_s)
        with suppress(OSError, MalformedResponseError):
            await self.read()

    def release_channel(self) -> Channel | None:
        """The channel, if another request may use it; else it is closed."""
        if self._parser.reusable and self._channel.is_reusable():
            return self._channel
        self.close()
        return None

    def close(self) -> None:
        """At once."""
        self._channel.close()

    async def _receive(self) -> bytes:
        data = await self._channel.receive(self._remaining_s())
        if data:
            self.response_started = True
            return self._parser.feed(data)
        self._parser.feed_eof()
        return b""

    def _remaining_s(self) -> float:
        left_s = self._remaining_time()
        if left_s <= 0:
            raise TimeoutError
        return left_s
