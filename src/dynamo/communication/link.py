"""One connection: frames in as calls, frames out gathered into one write a turn of the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import msgspec

from dynamo.communication.frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, Splitter
from dynamo.core.errors import ProtocolError

log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES: Final = 256 << 20
FAREWELL_S: Final = 1.0
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Flusher:
    """Runs what was armed in this turn of the loop, once, in the next: the one call_soon of it."""

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []

    def arm(self, flush: Callable[[], None]) -> None:
        """Call `flush` with the next turn of the loop."""
        if not self._due:
            self._loop.call_soon(self._run)
        self._due.append(flush)

    def _run(self) -> None:
        due = self._due
        for flush in due:  # a flush may arm another: the list grows while it is walked
            try:
                flush()
            except Exception:  # one connection's trouble is not the others'
                log.exception("writing failed")
        due.clear()


class Peer(Protocol):
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
        "_armed",
        "_flusher",
        "_frames",
        "_peer",
        "_splitter",
        "before_write",
        "congested",
        "lost",
        "on_relief",
        "transport",
    )

    def __init__(self, peer: Peer, flusher: Flusher) -> None:
        self._peer = peer
        self._flusher = flusher
        self._splitter = Splitter(MAX_HELLO_BYTES)
        self._frames: list[bytes] = []
        self._armed = False
        self.before_write: Callable[[], list[bytes]] | None = None
        self.on_relief: Callable[[], None] | None = None
        self.congested = False
        self.lost = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def greeted(self) -> None:
        """The handshake is done: frames of full size may come."""
        self._splitter.limit_bytes = MAX_FRAME_BYTES

    def arm(self) -> None:
        """Write in the next turn of the loop; `before_write` is asked for frames then."""
        if not self._armed:
            self._armed = True
            self._flusher.arm(self.flush)

    def write(self, frame: bytes) -> None:
        """Queue a whole frame for the next write."""
        self._frames.append(frame)
        if not self._armed:
            self.arm()

    def flush(self) -> None:
        """Write what is queued. A peer that took nothing for 256 MiB is cut off."""
        self._armed = False
        frames = self._frames
        if self.before_write is not None:
            frames += self.before_write()
        transport = self.transport
        if not frames or transport is None or transport.is_closing():
            frames.clear()
            return
        transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        frames.clear()
        if transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            log.warning("connection cut off: unread", extra={"fields": self._about()})
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
        self._peer.on_connect()

    def data_received(self, data: bytes) -> None:
        on_frame = self._peer.on_frame
        try:
            for kind, count, body in self._splitter.feed(data):
                on_frame(kind, count, body)
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            fields = self._about() | {"error": str(error)}
            log.warning("connection closed: protocol broken", extra={"fields": fields})
            self.abort()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self.on_relief is not None:
            self.on_relief()

    def connection_lost(self, exc: Exception | None) -> None:
        self._frames.clear()
        self.lost.set()
        self._peer.on_lost(exc)

    def _about(self) -> dict[str, object]:
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return {"peer": str(peer)}


async def close_links(links: Sequence[Link]) -> None:
    """Write what is queued and close; a peer that has not taken it in a second is cut off."""
    for link in links:
        link.close()
    try:
        async with asyncio.timeout(FAREWELL_S):
            for link in links:
                await link.lost.wait()
    except TimeoutError:
        for link in links:
            link.abort()
