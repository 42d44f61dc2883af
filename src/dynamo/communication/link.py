"""A connection that carries frames: on_frame per frame received, one write per loop iteration."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, Protocol, cast

from dynamo.communication.frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, Frame, FrameSplitter
from dynamo.core.errors import DECODE_ERRORS, ProtocolError

log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES: Final = 256 << 20
CLOSE_TIMEOUT_S: Final = 1.0
MAX_TURN_S: Final = 0.01
"""Received frames are handled for so long in one iteration of the loop, others in the next."""
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class TurnFlusher:
    """Flushes all links that were written to in one loop iteration with a single call_soon."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduled: list[Callable[[], None]] = []

    def schedule(self, flush: Callable[[], None]) -> None:
        """Call `flush` once in the next iteration of the loop."""
        if not self._scheduled:
            self._loop.call_soon(self._flush_all)
        self._scheduled.append(flush)

    def _flush_all(self) -> None:
        scheduled = self._scheduled
        for flush in scheduled:  # a flush may schedule another: the list grows during the loop
            try:
                flush()
            except Exception:  # an error of one connection must not reach the others
                log.exception("flushing a connection failed")
        scheduled.clear()


class LinkHandler(Protocol):
    """The owner of a connection, which handles its frames."""

    def on_connect(self) -> None:
        """Handle the open connection. No frame was read yet."""

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        """Handle one frame. `ProtocolError` and errors of decoding close the connection."""

    def on_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection. Called once."""


class HandshakeLink(Protocol):
    """The part of a connection that a handshake needs."""

    def write(self, frame: bytes) -> None:
        """Queue a frame."""

    def flush(self) -> None:
        """Send the queued frames before the connection is closed."""

    def accept_large_frames(self) -> None:
        """Accept frames of full size: the peer is proven."""

    def abort(self) -> None:
        """Close the connection at once."""

    def time_out(self) -> None:
        """Close the connection because its handshake takes too long."""


class Link(asyncio.Protocol):
    """Passes received frames to a `LinkHandler` and joins its writes.

    A peer that breaks the protocol is disconnected. `congested` is True while more bytes wait than
    the transport's high-water mark allows. `on_writable` is called when that ends. `written_bytes`
    counts what was passed to the transport.
    """

    def __init__(self, handler: LinkHandler, flusher: TurnFlusher) -> None:
        self._handler = handler
        self._flusher = flusher
        self._splitter = FrameSplitter(MAX_HELLO_BYTES)
        self._pending_frames: list[bytes] = []
        self._received: deque[Frame] = deque()
        self._paused = False
        self._flush_scheduled = False
        self.before_write: Callable[[], list[bytes]] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.congested = False
        self._aborted = False
        self.written_bytes = 0
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def accept_large_frames(self) -> None:
        """Accept frames of full size. Called after the handshake."""
        self._splitter.limit_bytes = MAX_FRAME_BYTES
        asyncio.get_running_loop().call_soon(self._receive_rest)

    @property
    def unsent_bytes(self) -> int:
        """Bytes passed to the transport that the peer's host has not taken yet."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def schedule_flush(self) -> None:
        """Flush in the next iteration of the loop. `before_write` then supplies more frames."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._flusher.schedule(self.flush)

    def write(self, frame: bytes) -> None:
        """Queue a whole frame for the next flush."""
        self._pending_frames.append(frame)
        if not self._flush_scheduled:
            self.schedule_flush()

    def flush(self) -> None:
        """Write the queued frames. A peer that leaves 256 MiB unread is disconnected."""
        self._flush_scheduled = False
        frames = self._pending_frames
        if self.before_write is not None:
            frames += self.before_write()
        transport = self.transport
        if not frames or transport is None or self._aborted or transport.is_closing():
            frames.clear()
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        transport.write(data)
        self.written_bytes += len(data)
        frames.clear()
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            log.warning(
                "connection aborted: the peer does not read", extra={"fields": self._log_fields()}
            )
            self.abort()

    def close(self) -> None:
        """Write the queued frames, then close."""
        if self.transport is not None:
            self.flush()
            self.transport.close()

    def abort(self) -> None:
        """Close at once and drop unsent frames."""
        self._aborted = True
        self._received.clear()
        if self.transport is not None:
            self.transport.abort()

    def time_out(self) -> None:
        """Abort a connection whose handshake takes too long."""
        if self.transport is None:  # TLS has failed, which asyncio reports to nobody
            self.connection_lost(None)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            keep_alive(sock)
        self._handler.on_connect()
        if self._aborted:  # before TLS was up
            self.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._received += self._splitter.feed(data)
            if not self._paused:
                on_frame, received = self._handler.on_frame, self._received
                end = monotonic() + MAX_TURN_S
                while received and monotonic() < end:
                    on_frame(*received.popleft())
                if received:
                    self._pause_receiving()
        except (ProtocolError, *DECODE_ERRORS) as error:
            fields = self._log_fields() | {"error": str(error)}
            log.warning("connection aborted: protocol error", extra={"fields": fields})
            self.abort()

    def _pause_receiving(self) -> None:
        """Let the loop run after `MAX_TURN_S`. The peer waits until all other frames are
        handled."""
        self._paused = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._receive_rest)

    def _receive_rest(self) -> None:
        """Handle frames that wait, or a large one that came with the last one of the handshake."""
        if self._aborted or self.closed.is_set():
            return
        paused, self._paused = self._paused, False
        try:
            self.data_received(b"")
        except Exception:
            self.abort()  # as the loop does where `data_received` fails
            raise
        transport = self.transport
        if paused and not (self._paused or transport is None or transport.is_closing()):
            transport.resume_reading()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pending_frames.clear()
        self._received.clear()
        self.closed.set()
        self._handler.on_lost(exc)

    def _log_fields(self) -> dict[str, object]:
        peername = self.transport.get_extra_info("peername") if self.transport is not None else None
        return {"peer": str(peername)}


def keep_alive(sock: socket.socket) -> None:
    """Send small packets at once, and notice within half a minute that the peer's host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def close_links(links: Sequence[Link]) -> None:
    """Flush and close links. A peer that does not read within `CLOSE_TIMEOUT_S` is aborted."""
    for link in links:
        link.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            for link in links:
                await link.closed.wait()
    except TimeoutError:
        for link in links:
            link.abort()
