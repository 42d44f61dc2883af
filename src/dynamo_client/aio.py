"""The network over asyncio."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import cast

from dynamo_client.config import Origin
from dynamo_client.network import Channel, NetworkBackend

MAX_BUFFERED_BYTES = 256 << 10
"""Reading pauses while more than this is buffered."""


class AsyncNetworkBackend(NetworkBackend):
    """Opens connections on the running event loop."""

    async def connect(self, origin: Origin, timeout_s: float) -> Channel:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if origin.secure else None
        async with asyncio.timeout(timeout_s):
            _, channel = await loop.create_connection(
                lambda: AsyncChannel(loop), origin.host, origin.port, ssl=context
            )
        return channel

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AsyncChannel(asyncio.Protocol, Channel):
    """An asyncio connection. A read needs neither a task nor a timer of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._ended = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, data: bytes, timeout_s: float) -> None:
        """Write `data` without waiting: a peer that does not read does not answer either."""
        del timeout_s
        if self._transport is None or self._ended:
            raise ConnectionResetError("the connection is closed")
        self._transport.write(data)

    async def receive(self, timeout_s: float) -> bytes:
        if not self._buffered and not self._ended:
            self._waiter = self._loop.create_future()
            self._set_deadline(timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._buffered:
            return self._drain_buffer()
        if self._failure is not None:
            raise self._failure
        return b""

    def is_reusable(self) -> bool:
        """Whether the connection is open, has nothing to read, and uses the running loop."""
        return self._loop is asyncio.get_running_loop() and not self._ended and not self._buffered

    def close(self) -> None:
        self._ended = True
        transport, self._transport = self._transport, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if transport is not None and not self._loop.is_closed():
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > MAX_BUFFERED_BYTES and self._transport is not None:
            with suppress(RuntimeError):  # reading is paused already
                self._transport.pause_reading()
        self._wake_reader()

    def eof_received(self) -> None:
        self._ended = True
        self._wake_reader()

    def connection_lost(self, failure: Exception | None) -> None:
        self._ended = True
        self._failure = failure
        self._wake_reader()

    def _drain_buffer(self) -> bytes:
        parts, self._buffered = self._buffered, []
        if self._buffered_bytes > MAX_BUFFERED_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._buffered_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_deadline(self, timeout_s: float) -> None:
        """Move the deadline of the present read. Many reads share one timer, which compares the
        time with the deadline when it fires."""
        self._deadline = self._loop.time() + timeout_s
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._on_deadline)
        else:
            self._waiter.set_exception(TimeoutError("no data arrived"))
