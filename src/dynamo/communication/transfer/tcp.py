"""The transfer plane over TCP, with checksums and optionally mutual TLS."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, Final, Self

from dynamo.communication.addresses import advertised_host, bracket_ipv6, parse_listen_url
from dynamo.communication.link import keep_alive
from dynamo.communication.transfer.backend import BackendPeer
from dynamo.communication.transfer.compression import ZSTD, LinkCompression, check_zstd
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.plane import TransferSetup
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.communication.transfer.socket_plane import SocketTransfer
from dynamo.communication.transfer.sockets import SocketLink, attach_to, dial, readable
from dynamo.communication.transfer.tcp_stream import (
    STALL_S,
    SlotChannel,
    open_channel,
    receive_slots,
    serve_read,
)
from dynamo.communication.transports import open_tls
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.core.tasks import run_all

CONNECTIONS: Final = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Connections to a peer, each with a thread at both ends; with few cores one is quickest. A pull
uses all of them if each has `MIN_PART_BYTES` to carry."""
MIN_PART_BYTES: Final = 1 << 20
LOCAL_BUFFER_BYTES: Final = 1 << 20
INITIAL_LATENCY_S: Final = 0.0005
INITIAL_BYTES_PER_S: Final = 0.5e9


class TcpTransfer(SocketTransfer):
    """The backend `tcp://HOST:PORT`."""

    scheme = "tcp"
    client_tls: ssl.SSLContext | None = None
    compresses = False

    @classmethod
    async def open(cls, url: str, setup: TransferSetup) -> Self:
        plane = cls(setup)
        if setup.options.compression == "zstd":
            check_zstd("nixl.compression")
            plane.compresses = True
        plane._host, plane._port = host, _ = parse_listen_url(url)
        plane.server_tls, plane.client_tls = await open_tls(url, host, setup.options)
        plane._advertised_host = advertised_host(host, setup.options.advertised_host)
        return plane

    _host = "127.0.0.1"
    _port = 0
    _advertised_host = "127.0.0.1"

    async def connect_socket(self, endpoint: str, link: SocketLink) -> None:
        """Connect `link` to a peer's endpoint. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        family, address = await _resolve(*parse_listen_url(endpoint))
        sock = socket.socket(family, socket.SOCK_STREAM)
        link.set_socket(sock)
        sock.setblocking(False)
        keep_alive(sock)
        await loop.sock_connect(sock, address)
        _bound_buffers(sock)
        if self.client_tls is not None:
            await link.start_tls(self.client_tls, server_side=False)

    async def _listen(self) -> str:
        try:
            listening_socket = await _open_listener(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self.scheme}://{self._host}:{self._port}: "
                f"{error.strerror or error}",
                hint="give --transfer-plane an address of this host; with port 0 each worker "
                "takes a free one",
                param="runtime.transfer",
            ) from None
        self._start_accepting(listening_socket)
        host, port = bracket_ipv6(self._advertised_host), listening_socket.getsockname()[1]
        return f"{self.scheme}://{host}:{port}"

    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        peer = TcpPeer(self, descriptor, region, self.endpoint_of(descriptor))
        await peer.connect()
        return peer

    async def _serve(self, sock: socket.socket) -> None:
        region = self.region
        if region is None:
            return
        keep_alive(sock)
        _bound_buffers(sock)
        channel = open_channel(sock, STALL_S)
        serve = partial(serve_read, channel, region)
        while True:
            if not (isinstance(sock, ssl.SSLSocket) and sock.pending()):
                await readable(sock)
            if not await self.serving_threads.run(serve, channel.shut_down):
                return


class TcpPeer(BackendPeer):
    """A process that is reached over TCP. A broken connection is dialled again by the next pull."""

    def __init__(
        self, plane: TcpTransfer, descriptor: RegionDescriptor, region: MemoryRegion, endpoint: str
    ) -> None:
        estimate = TransferEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        super().__init__(plane, descriptor, region, estimate)
        self._tcp = plane
        self._endpoint = endpoint
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._idle: list[SlotChannel] = []
        self._busy: set[SlotChannel] = set()
        self._closed = False
        self._compression = LinkCompression() if plane.compresses else None
        self._link = TransferEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        """The rate of pulls that are not compressed."""

    async def connect(self) -> None:
        """Open the first connection. Raises `TransferFailed`."""
        self._idle.append(await self._dial())

    async def _close(self) -> None:
        self._closed = True
        for channel in self._busy:
            channel.shut_down()
        while self._idle:
            self._idle.pop().close()

    async def _copy(self, reads: Sequence[SlotRead]) -> None:
        parts = self._divide(reads, CONNECTIONS, MIN_PART_BYTES)
        if len(parts) == 1:
            await self._copy_part(reads)
        else:
            await run_all(*map(self._copy_part, parts))

    async def _copy_part(self, reads: Sequence[SlotRead]) -> None:
        async with self._places:
            channel, stop = await self._take_channel(), Event()
            self._busy.add(channel)
            reusable = False

            def shut_down() -> None:
                stop.set()
                channel.shut_down()

            try:
                await self._receive(channel, reads, stop, shut_down)
                reusable = True
            except TransferFailed as error:
                if error.reason == "refused":
                    self._compression = None  # the peer may not know zstd
                raise TransferFailed.of(error.reason, f"{self._name}: {error.message}") from None
            except (OSError, EOFError) as error:
                text = f"the connection to {self._name} broke: {str(error) or 'closed'}"
                raise TransferFailed.of("gone", text) from None
            finally:
                self._busy.discard(channel)
                if reusable and not self._closed:
                    self._idle.append(channel)
                else:
                    channel.close()

    async def _receive(
        self,
        channel: SlotChannel,
        reads: Sequence[SlotRead],
        stop: Event,
        shut_down: Callable[[], None],
    ) -> None:
        """Receive slots, compressed where that pays."""
        compression, link = self._compression, self._link
        encoding = ZSTD if compression is not None and compression.choose(link.bytes_per_s) else 0
        size, started_s = len(reads) * self._region.slot_bytes, self._clock.now()
        work = partial(receive_slots, channel, self._region, reads, stop, encoding)
        received = await self._tcp.threads.run(work, shut_down)
        now = self._clock.now()
        if encoding and compression is not None:
            compression.on_pulled(size, received, now - started_s, link.bytes_per_s)
        elif compression is not None:
            link.start(size, started_s)
            link.finish(size, now, completed=True)

    async def _take_channel(self) -> SlotChannel:
        if self._closed:
            raise TransferFailed.of("gone", "this process closed its connection to the peer")
        while self._idle:
            channel = self._idle.pop()
            if not _has_input(channel.sock):
                return channel
            channel.close()  # the peer closed it meanwhile
        return await self._dial()

    async def _dial(self) -> SlotChannel:
        plane = self._tcp
        connect = partial(plane.connect_socket, self._endpoint)
        return open_channel(
            await dial(
                connect, self.descriptor.incarnation, plane.secret, attach_to(self.descriptor)
            )
        )


def _bound_buffers(sock: socket.socket) -> None:
    """Bound the bytes on their way within one host, so that they stay in the cache of its cores."""
    if sock.getsockname()[0] == sock.getpeername()[0]:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, LOCAL_BUFFER_BYTES)


def _has_input(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


async def _open_listener(host: str, port: int) -> socket.socket:
    family, address = await _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


async def _resolve(host: str, port: int) -> tuple[int, Any]:
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = infos[0]
    return family, address
