"""The transfer plane between processes of one host: the reader maps the owner's memory.

The owner passes its memfd, read-only, over an abstract Unix socket after the handshake. If its
slots lie in the memory of a device, only their generations are in the memfd, and a description of
that memory comes with it (CUDA IPC). A pull is one copy by the reader; the owner takes no part in
it. The kernel frees sockets and memory with the processes, however they end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Final

from dynamo.communication.transfer.backend import BackendPeer
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.peer_memory import PeerMemory
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.communication.transfer.socket_plane import SocketTransfer
from dynamo.communication.transfer.sockets import SocketLink, attach_to, dial, readable, when_ready
from dynamo.core.errors import ProtocolError, TransferFailed
from dynamo.core.tasks import run_all

MIN_PART_BYTES: Final = 8 << 20
INITIAL_LATENCY_S: Final = 0.0002
INITIAL_BYTES_PER_S: Final = 3e9
SHARED: Final = 1
"""The first byte that comes with the memfd, if a description of a device's memory follows."""
MAX_MESSAGE_BYTES: Final = 4096
_CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid, gid of SO_PEERCRED."""


@cache
def host_id() -> str:
    """Identify this host and network namespace, in which abstract sockets are visible."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - the link's target
    return hashlib.sha256(f"{boot_id}{namespace}".encode()).hexdigest()[:16]


class ShmTransfer(SocketTransfer):
    """The backend `shm:`. Only processes of this user can connect."""

    scheme = "shm"

    async def _listen(self) -> str:
        name = f"dynamo-transfer-{self.incarnation}"
        listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening_socket.bind(f"\0{name}")
        listening_socket.listen()
        self._start_accepting(listening_socket)
        return f"shm://{host_id()}/{name}"

    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        name = self.endpoint_of(descriptor).rpartition("/")[2]
        sock = await dial(
            partial(_connect_socket, name),
            descriptor.incarnation,
            self.secret,
            attach_to(descriptor),
        )
        try:
            memory = await self._receive_memory(sock, descriptor)
        except BaseException:
            sock.close()
            raise
        return ShmPeer(self, descriptor, region, sock, memory)

    def endpoint_of(self, descriptor: RegionDescriptor) -> str:
        endpoint = super().endpoint_of(descriptor)
        if not endpoint.startswith(f"shm://{host_id()}/"):
            text = f"the peer {descriptor.incarnation} runs on another host or in another network"
            raise TransferFailed.of("refused", f"{text} namespace")
        return endpoint

    def _check_peer(self, sock: socket.socket) -> None:
        _check_user(sock)

    async def _serve(self, sock: socket.socket) -> None:
        """Pass the memory on and wait until the peer leaves."""
        region = self.region
        if region is None:
            return
        fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY)
        try:
            message = bytes((SHARED,)) + shared if (shared := region.share()) else b"\0"
            await when_ready(sock, lambda: socket.send_fds(sock, [message], [fd]))
        finally:
            os.close(fd)
        await readable(sock)

    async def _receive_memory(
        self, sock: socket.socket, descriptor: RegionDescriptor
    ) -> PeerMemory:
        try:
            async with asyncio.timeout(2.0):
                message, fds, _, _ = await when_ready(
                    sock, lambda: socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
                )
        except (OSError, TimeoutError):
            message, fds = b"", []
        if not fds:
            text = f"the peer {descriptor.incarnation} passed no memory"
            raise TransferFailed.of("gone", text)
        try:
            copy_shared = None
            if message[0] == SHARED and self.region is not None:
                copy_shared = self.region.open_shared(message[1:], descriptor.slots)
            return PeerMemory(fds[0], descriptor.slots, descriptor.slot_bytes, copy_shared)
        except OSError as error:
            text = f"the memory of the peer {descriptor.incarnation} cannot be mapped: {error}"
            raise TransferFailed.of("refused", text) from None
        finally:
            for fd in fds:
                os.close(fd)


class ShmPeer(BackendPeer):
    """A process of this host. When its socket ends, it is gone for good."""

    def __init__(
        self,
        plane: ShmTransfer,
        descriptor: RegionDescriptor,
        region: MemoryRegion,
        sock: socket.socket,
        memory: PeerMemory,
    ) -> None:
        estimate = TransferEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        super().__init__(plane, descriptor, region, estimate)
        self._threads = plane.threads
        self._memory = memory
        self._sock = sock
        self._stops: set[Event] = set()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._on_end)

    async def _close(self) -> None:
        self._on_end()

    async def _copy(self, reads: Sequence[SlotRead]) -> None:
        memory, stop = self._memory, Event()
        memory.begin()
        self._stops.add(stop)
        try:
            parts = self._divide(reads, memory.copy_threads, MIN_PART_BYTES)
            copies = (partial(memory.copy, self._region, part, stop) for part in parts)
            await run_all(*(self._threads.run(copy, stop.set) for copy in copies))
            if stop.is_set():
                raise TransferFailed.of("gone", f"{self._name} has ended")
        finally:
            self._stops.discard(stop)
            memory.end()

    def _on_end(self) -> None:
        """The process has ended, or this end closes. Its memory must not outlive it here."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        for stop in self._stops:
            stop.set()
        self._memory.close()


async def _connect_socket(name: str, link: SocketLink) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.set_socket(sock)
    sock.setblocking(False)
    await when_ready(sock, lambda: sock.connect(f"\0{name}"))
    _check_user(sock)


def _check_user(sock: socket.socket) -> None:
    """Raise `ProtocolError` if another user has the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ProtocolError(f"the peer runs as user {user}, this process as {os.geteuid()}")
