"""The transfer plane over TCP, with checksums and optionally mutual TLS."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import Any, Final, Self

from dynamo.communication.addresses import advertised_host, new_incarnation, parse_listen_url
from dynamo.communication.link import keep_alive
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer.backend import BackendPeer
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.communication.transfer.socket_plane import SocketTransfer
from dynamo.communication.transfer.sockets import SocketLink, dial, readable
from dynamo.communication.transfer.tcp_stream import (
    MAX_READS,
    STALL_S,
    SlotChannel,
    open_channel,
    receive_slots,
    serve_read,
)
from dynamo.communication.transports import open_tls
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, TransferFailed
from dynamo.core.tasks import run_all

CONNECTIONS: Final = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Connections to a peer, each with a thread at both ends; with few cores one is quickest. A pull
uses all of them if each has `MIN_PART_BYTES` to carry."""
MIN_PART_BYTES: Final = 1 << 20
INITIAL_LATENCY_S: Final = 0.0005
INITIAL_BYTES_PER_S: Final = 0.5e9


class TcpTransfer(SocketTransfer):
    """The backend `tcp://HOST:PORT`."""

    scheme = "tcp"
    client_tls: ssl.SSLContext | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        options: PlaneOptions = DEFAULT_OPTIONS,
        clock: Clock | None = None,
        metrics: TransferMetrics | None = None,
        incarnation: str = "",
    ) -> Self:
        """Create a plane that does not listen yet. Raises `ConfigError` as the request plane."""
        host, port = parse_listen_url(url)
        tls = await open_tls(url, host, options)
        secret = options.secret or options.folder_secret
        plane = cls(clock or SystemClock(), incarnation or new_incarnation(), secret, metrics)
        plane.server_tls, plane.client_tls = tls
        plane._host, plane._port = host, port
        plane._advertised_host = advertised_host(host, options.advertised_host)
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
        if self.client_tls is not None:
            await link.start_tls(self.client_tls, server_side=False)

    async def _listen(self) -> str:
        try:
            listening_socket = await _open_listener(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on tcp://{self._host}:{self._port}: {error.strerror or error}",
                hint="give --transfer-plane an address of this host; with port 0 each worker "
                "takes a free one",
                param="runtime.transfer",
            ) from None
        self._start_accepting(listening_socket)
        host = self._advertised_host
        host = f"[{host}]" if ":" in host else host
        return f"tcp://{host}:{listening_socket.getsockname()[1]}"

    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        peer = TcpPeer(self, descriptor, region, self.endpoint_of(descriptor))
        await peer.connect()
        return peer

    async def _serve(self, sock: socket.socket) -> None:
        region = self.region
        if region is None:
            return
        keep_alive(sock)
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
        size = len(reads) * self._region.slot_bytes
        parts = max(1, min(CONNECTIONS, size // MIN_PART_BYTES))
        per_part = min(-(-len(reads) // parts), MAX_READS)
        starts = range(0, len(reads), per_part)
        if len(starts) == 1:
            await self._copy_part(reads)
        else:
            await run_all(*(self._copy_part(reads[at : at + per_part]) for at in starts))

    async def _copy_part(self, reads: Sequence[SlotRead]) -> None:
        async with self._places:
            channel, stop = await self._take_channel(), Event()
            self._busy.add(channel)
            reusable = False

            def shut_down() -> None:
                stop.set()
                channel.shut_down()

            try:
                work = partial(receive_slots, channel, self._region, reads, stop)
                await self._tcp.threads.run(work, shut_down)
                reusable = True
            except TransferFailed as error:
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
            await dial(connect, self.descriptor.incarnation, plane.secret, plane.attach)
        )


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
