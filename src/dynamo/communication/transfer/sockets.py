"""Sockets of the transfer plane: proven on the event loop, then used by threads.

After the handshake of all planes the client sends ATTACH with its layout, and the server answers
ATTACHED. A backend's own exchange follows.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from dynamo.communication.frames import HEADER, MAX_HELLO_BYTES, pack_frame
from dynamo.communication.handshake import (
    CLOSED_DURING_HANDSHAKE,
    ClientHandshake,
    ListeningProcess,
    ServerHandshake,
)
from dynamo.communication.transfer.region import RegionDescriptor
from dynamo.communication.transports import HANDSHAKE_TIMEOUT_S
from dynamo.core.errors import (
    DECODE_ERRORS,
    ConfigError,
    InstanceGone,
    ProtocolError,
    TransferFailed,
    TransferFailure,
)

T = TypeVar("T")

PLANE: Final = "transfer"
ATTACH: Final = 2
ATTACHED: Final = 3


class Attach(msgspec.Struct, frozen=True):
    """The blocks of the process that sends it. A server's `refusal` says why it does not serve."""

    layout: str
    slot_bytes: int
    refusal: str = ""


_decode_attach = msgspec.msgpack.Decoder(Attach).decode


async def when_ready(sock: socket.socket, operation: Callable[[], T]) -> T:
    """Return the result of a non-blocking operation, repeated whenever the socket is ready."""
    while True:
        try:
            return operation()
        except (BlockingIOError, ssl.SSLWantReadError):
            await readable(sock)
        except ssl.SSLWantWriteError:
            await _writable(sock)


async def readable(sock: socket.socket) -> None:
    """Wait until the socket has bytes to read, or its end."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _writable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock.fileno())


class SocketLink:
    """A non-blocking socket as the handshake uses it. `sock` is replaced when TLS wraps it."""

    def __init__(
        self, sock: socket.socket | None = None, on_abort: Callable[[], object] | None = None
    ) -> None:
        self._sock = sock
        self._on_abort = on_abort or self.close
        self._unsent = b""

    @property
    def sock(self) -> socket.socket:
        """The socket. Raises `InstanceGone` before the connection is up."""
        if self._sock is None:
            raise InstanceGone("the connection is closed")
        return self._sock

    def set_socket(self, sock: socket.socket) -> None:
        """Use a socket that is connected now, or wrapped in TLS."""
        self._sock = sock

    def write(self, frame: bytes) -> None:
        self._unsent += frame

    def flush(self) -> None:
        """Do nothing: `send_pending` follows each frame."""

    def accept_large_frames(self) -> None:
        """Do nothing: only frames of a handshake are read here."""

    def abort(self) -> None:
        self._on_abort()

    def time_out(self) -> None:
        self._on_abort()

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Wrap the socket and exchange certificates. Raises `OSError`."""
        wrapped = context.wrap_socket(
            self.sock, server_side=server_side, do_handshake_on_connect=False
        )
        self.set_socket(wrapped)
        await when_ready(wrapped, wrapped.do_handshake)

    async def send_pending(self) -> None:
        """Send the frames that were written. Raises `OSError`."""
        data, self._unsent = memoryview(self._unsent), b""
        while data:
            sock = self.sock
            data = data[await when_ready(sock, lambda: sock.send(data)) :]  # noqa: B023

    async def receive_frame(self) -> tuple[int, bytes]:
        """Return kind and body of the next frame. Raises `ProtocolError` and `InstanceGone`."""
        length, kind, _, _ = HEADER.unpack(await self._receive(HEADER.size))
        if length > MAX_HELLO_BYTES:
            raise ProtocolError(f"a frame of {length} bytes, limit {MAX_HELLO_BYTES}")
        return kind, await self._receive(length)

    async def _receive(self, size: int) -> bytes:
        sock, data = self.sock, b""
        while len(data) < size:
            part = await when_ready(sock, lambda: sock.recv(size - len(data)))  # noqa: B023
            if not part:
                raise InstanceGone(CLOSED_DURING_HANDSHAKE)
            data += part
        return data


async def dial(
    connect: Callable[[SocketLink], Awaitable[None]], incarnation: str, secret: str, own: Attach
) -> socket.socket:
    """Return a proven socket to the process `incarnation`. Raises `TransferFailed`."""
    link = SocketLink()
    handshake = ClientHandshake(link, PLANE, incarnation, secret)

    async def exchange(link: SocketLink) -> None:
        await connect(link)
        handshake.send_hello()
        await link.send_pending()
        while not handshake.done:
            frame = await link.receive_frame()
            with suppress(ProtocolError):  # `connect` of the handshake raises it
                handshake.receive(*frame)
                await link.send_pending()

    try:
        await handshake.connect(exchange)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await _attach(link, own)
    except BaseException as error:
        link.close()
        reason = _reason_of(error)
        if reason is None:
            raise
        text = str(error) or f"no answer within {HANDSHAKE_TIMEOUT_S:.0f} s"
        raise TransferFailed.of(reason, f"the peer {incarnation}: {text}") from None
    return link.sock


async def _attach(link: SocketLink, own: Attach) -> None:
    """Send the layout of this process. Raises `ProtocolError` if the server refuses it."""
    link.write(pack_frame(ATTACH, msgspec.msgpack.encode(own)))
    await link.send_pending()
    answer = await _receive_attach(link, ATTACHED)
    if answer.refusal:
        raise ProtocolError(answer.refusal)


async def accept(
    link: SocketLink,
    listener: ListeningProcess,
    tls: ssl.SSLContext | None,
    own: Attach,
) -> None:
    """Serve the handshake of an accepted connection. Raises `DynamoError` and `OSError`."""
    handshake = ServerHandshake(link, PLANE, listener)
    try:
        if tls is not None:
            await link.start_tls(tls, server_side=True)
        while not handshake.done:
            frame = await link.receive_frame()
            try:
                handshake.receive(*frame)
            finally:
                await link.send_pending()
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            peer = await _receive_attach(link, ATTACH)
            refusal = _compare(own, peer)
            answer = msgspec.structs.replace(own, refusal=refusal)
            link.write(pack_frame(ATTACHED, msgspec.msgpack.encode(answer)))
            await link.send_pending()
    finally:
        handshake.on_lost()
    if refusal:
        raise ProtocolError(refusal)


async def _receive_attach(link: SocketLink, expected: int) -> Attach:
    kind, body = await link.receive_frame()
    if kind != expected:
        raise ProtocolError(f"a frame of kind {kind}, not {expected}")
    try:
        return _decode_attach(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"unreadable layout: {error}") from error


def attach_to(descriptor: RegionDescriptor) -> Attach:
    """The layout that a reader claims: it reads slots as the owner describes them."""
    return Attach(descriptor.layout, descriptor.slot_bytes)


def _compare(own: Attach, peer: Attach) -> str:
    if (own.layout, own.slot_bytes) == (peer.layout, peer.slot_bytes):
        return ""
    return (
        f"blocks of layout {own.layout} with {own.slot_bytes} bytes do not fit layout "
        f"{peer.layout} with {peer.slot_bytes} bytes"
    )


def _reason_of(error: BaseException) -> TransferFailure | None:
    """The reason of a failed connection; None for other errors."""
    if isinstance(error, ProtocolError | ConfigError | ValueError):  # or no address
        return "refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "gone" if isinstance(error, OSError | InstanceGone) else None
