"""An HTTP request and its response over one channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from dynamo_client.http1 import MalformedResponseError, ResponseHead, ResponseParser
from dynamo_client.network import Channel

RemainingTime = Callable[[], float]
"""Returns the seconds that may pass until the next byte."""


def total_timeout(timeout_s: float) -> RemainingTime:
    """Limit the whole call to `timeout_s`."""
    end = time.monotonic() + timeout_s
    return lambda: end - time.monotonic()


def idle_timeout(timeout_s: float) -> RemainingTime:
    """Limit each wait for data to `timeout_s`."""
    return lambda: timeout_s


class HttpCall:
    """Owns the channel until `release_channel`. `response_started` is True after the first byte of
    the response."""

    def __init__(self, channel: Channel, remaining_time: RemainingTime) -> None:
        self.response_started = False
        self._channel = channel
        self._remaining_time = remaining_time
        self._parser = ResponseParser()
        self._buffered_body = b""

    async def start(self, request: bytes) -> ResponseHead:
        """Send the request and wait for status and headers. Raises `OSError` and
        `MalformedResponseError`."""
        # A server may answer and close before it has read a request that is too large.
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._channel.send(request, self._remaining_s())
        while self._parser.head is None:
            self._buffered_body = await self._receive()
        return self._parser.head

    async def read(self) -> bytes:
        """Return the next bytes of the body; b"" at its end."""
        data, self._buffered_body = self._buffered_body, b""
        while not data and not self._parser.complete:
            data = await self._receive()
        return data

    async def read_body(self) -> bytes:
        """Return the rest of the body."""
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def drain(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the end of a body whose content is complete."""
        self._remaining_time = idle_timeout(timeout_s)
        with suppress(OSError, MalformedResponseError):
            await self.read()

    def release_channel(self) -> Channel | None:
        """Return the channel if another request may use it; otherwise close it."""
        if self._parser.reusable and self._channel.is_reusable():
            return self._channel
        self.close()
        return None

    def close(self) -> None:
        """Close the channel at once."""
        self._channel.close()

    async def _receive(self) -> bytes:
        data = await self._channel.receive(self._remaining_s())
        if data:
            self.response_started = True
            return self._parser.feed(data)
        self._parser.feed_eof()
        return b""

    def _remaining_s(self) -> float:
        remaining_s = self._remaining_time()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s
