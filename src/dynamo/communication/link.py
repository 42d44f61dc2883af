"""One connection: frames in as calls, frames out gathered into one write a turn of the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import msgspec

from dynamo.communication.frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameSplitter
from dynamo.core.errors import ProtocolError

log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES: Final = 256 << 20
CLOSE_TIMEOUT_S: Final = 1.0
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class TurnFlusher:
    """Runs what was armed in this turn of the loop, once, in the next: the one call_soon of it."""

    __slots__ = ("_loop", "_scheduled")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._scheduled: list[Callable[[], None]] = []

    def schedule(self, flush: Callable[[], None]) -> None:
        """Call `flush` with the next turn of the loop."""
        if not self._scheduled:
            self._loop.call_soon(self._flush_all)
        self._scheduled.append(flush)

    def _flush_all(self) -> None:
        due = self._scheduled
        for flush in due:  # a flush may arm another: the list grows while it is walked
            try:
                flush()
            except Exception:  # one connection's trouble is not the others'
                log.exception("writing failed")
        due.clear()


class LinkHandler(Protocol):
    """What a connection's owner makes of it."""

    def on_connect(self) -> None:
        """Connected; nothing was read yet."""

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        """One frame. Raising `ProtocolError` or what decoding raises closes the connection."""

    def on_lost(self, error: Exception | None) -> None:
        """The connection is closed; called once."""


class Link(asyncio.Protocol):
    """Feeds a `Peer`, gathers its writes. A peer that breaks the protocol is cut off.

    `congested`: more than the transport's high mark waits; `on_relief` is called when it is over.
    """

    __slots__ = (
        "_flush_scheduled",
        "_flusher",
        "_handler",
        "_pending_frames",
        "_splitter",
        "before_write",
        "closed",
        "congested",
        "on_writable",
        "transport",
    )

    def __init__(self, peer: LinkHandler, flusher: TurnFlusher) -> None:
        self._handler = peer
        self._flusher = flusher
        self._splitter = FrameSplitter(MAX_HELLO_BYTES)
        self._pending_frames: list[bytes] = []
        self._flush_scheduled = False
        self.before_write: Callable[[], list[bytes]] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.congested = False
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def accept_large_frames(self) -> None:
        """The handshake is done: frames of full size may come."""
        self._splitter.limit_bytes = MAX_FRAME_BYTES

    def schedule_flush(self) -> None:
        """Write in the next turn of the loop; `before_write` is asked for frames then."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._flusher.schedule(self.flush)

    def write(self, frame: bytes) -> None:
        """Queue a whole frame for the next write."""
        self._pending_frames.append(frame)
        if not self._flush_scheduled:
            self.schedule_flush()

    def flush(self) -> None:
        """Write what is queued. A peer that took nothing for 256 MiB is cut off."""
        self._flush_scheduled = False
        frames = self._pending_frames
        if self.before_write is not None:
            frames += self.before_write()
        transport = self.transport
        if not frames or transport is None or transport.is_closing():
            frames.clear()
            return
        transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        frames.clear()
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            log.warning("connection cut off: unread", extra={"fields": self._log_fields()})
            transport.abort()

    def close(self) -> None:
        """Write what is queued, then close."""
        if self.transport is not None:
            self.flush()
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._handler.on_connect()

    def data_received(self, data: bytes) -> None:
        on_frame = self._handler.on_frame
        try:
            for kind, count, body in self._splitter.feed(data):
                on_frame(kind, count, body)
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            fields = self._log_fields() | {"error": str(error)}
            log.warning("connection closed: protocol broken", extra={"fields": fields})
            self.abort()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pending_frames.clear()
        self.closed.set()
        self._handler.on_lost(exc)

    def _log_fields(self) -> dict[str, object]:
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return {"peer": str(peer)}


async def close_links(links: Sequence[Link]) -> None:
    """Write what is queued and close; a peer that has not taken it in a second is cut off."""
    for link in links:
        link.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            for link in links:
                await link.closed.wait()
    except TimeoutError:
        for link in links:
            link.abort()
