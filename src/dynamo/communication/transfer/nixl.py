"""The transfer plane by NIXL: one-sided reads over UCX, by RDMA where hosts and settings have it.

A peer's connection carries the handshake, the description of its memory, and its end. The bytes go
past it, by UCX. A pull reads slots, then their generation numbers: these only grow, so a number
that is right after the copy was right during it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import cycle
from threading import Event
from typing import Final

import msgspec

from dynamo.communication.addresses import is_loopback
from dynamo.communication.link import keep_alive
from dynamo.communication.transfer.backend import BackendPeer
from dynamo.communication.transfer.estimate import TransferEstimate
from dynamo.communication.transfer.nixl_agent import (
    NIXL_ERRORS,
    STAGE_SLOTS,
    Agent,
    Handle,
    NixlMemory,
    RegionAgent,
    Steps,
    descriptors,
    read,
    register_slots,
)
from dynamo.communication.transfer.plane import TransferSetup
from dynamo.communication.transfer.region import (
    ANY_GENERATION,
    GENERATION_BYTES,
    MemoryRegion,
    RegionDescriptor,
    SlotRead,
)
from dynamo.communication.transfer.runs import MAX_PIECES, group_pieces, transfer_bytes
from dynamo.communication.transfer.sockets import attach_to, dial, when_ready
from dynamo.communication.transfer.tcp import TcpTransfer
from dynamo.communication.transfer.threads import wait_for_job
from dynamo.core.errors import DECODE_ERRORS, ProtocolError, TransferFailed
from dynamo.core.tasks import run_all

log = logging.getLogger(__name__)

AGENTS: Final = max(1, min(4, os.cpu_count() or 1))
"""Agents of a process, each with a thread that reads: one core copies less than memory delivers."""
MIN_PART_BYTES: Final = 8 << 20
CONNECT_TIMEOUT_S: Final = 10.0
INITIAL_LATENCY_S: Final = 0.0005
INITIAL_BYTES_PER_S: Final = 3e9
MAX_HELLO_BYTES: Final = 64 << 10
OPEN_PORT_WARNING: Final = (
    "NIXL opens ports of UCX, which read and write memory of this process without a secret: let "
    "only trusted hosts and users reach it"
)
PULL_BEGINS: Final = b"\1"
PULL_ENDS: Final = b"\0"


class NixlTransfer(TcpTransfer):
    """The backend `nixl://HOST:PORT`. HOST:PORT is that of the connections that carry no blocks."""

    scheme = "nixl"

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        self._rdma = setup.options.rdma
        self._agents: list[RegionAgent] = []
        self._ready: asyncio.Future[list[None]] | None = None

    async def agents(self) -> Sequence[RegionAgent]:
        """Return the agents, when they have registered the region of this process. The first one
        serves peers; all read."""
        region = self.region
        if region is None or not region.has_memory:
            raise TransferFailed.of("refused", "nixl: needs KV memory to register")
        if self._ready is None:
            names = [_agent_name(self.incarnation, number) for number in range(AGENTS)]
            host_only = is_loopback(self._host) and not self._rdma
            if not host_only:
                log.warning(OPEN_PORT_WARNING, extra={"fields": {"host": self._host}})
            self._agents = [
                RegionAgent(name, region, rdma=self._rdma, host_only=host_only) for name in names
            ]
            jobs = [agent.run(agent.register) for agent in self._agents]
            work = run_all(*map(wait_for_job, jobs))
            self._ready = self._tasks.start(work, "register KV memory")
        await asyncio.shield(self._ready)
        return self._agents

    async def close(self) -> None:
        await super().close()
        for agent in self._agents:
            agent.close()
        for agent in self._agents:
            await asyncio.to_thread(agent.join)

    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> BackendPeer:
        peer = NixlPeer(self, descriptor, region)
        await peer.connect()
        return peer

    async def link(self, descriptor: RegionDescriptor, region: MemoryRegion) -> NixlLink:
        """Connect to a peer and let the agents know its memory, which is pulled into `region`.
        Raises `TransferFailed`."""
        agents = await self.agents()
        connect = partial(self.connect_socket, self.endpoint_of(descriptor))
        sock = await dial(connect, descriptor.incarnation, self.secret, attach_to(descriptor))
        stop = Event()
        sources: list[NixlSource] = []
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                memory = await _receive_memory(sock)
                pool = None if region is self.region else region
                sources += [NixlSource(agent, memory, descriptor, pool) for agent in agents]
                await when_ready(sock, lambda: sock.send(PULL_BEGINS))
                additions = [source.agent.run(partial(source.add, stop)) for source in sources]
                await run_all(*(wait_for_job(addition, stop.set) for addition in additions))
                await when_ready(sock, lambda: sock.send(PULL_ENDS))
        except BaseException as error:
            sock.close()
            stop.set()
            with suppress(TransferFailed, *NIXL_ERRORS):
                await run_all(*map(wait_for_job, _forget(sources)))
            if not isinstance(error, (OSError, EOFError, ProtocolError, *NIXL_ERRORS)):
                raise
            text = f"the peer {descriptor.incarnation} did not describe its memory: {error}"
            if isinstance(error, TimeoutError):
                raise TransferFailed.of("timeout", text) from None
            raise TransferFailed.of("gone", text) from None
        return NixlLink(sock, sources)

    async def _serve(self, sock: socket.socket) -> None:
        """Describe the region, then answer the network while the peer pulls."""
        keep_alive(sock)
        agent = (await self.agents())[0]
        body = msgspec.msgpack.encode(agent.memory)
        data, pulls = memoryview(len(body).to_bytes(4, "little") + body), 0
        try:
            while data:
                data = data[await when_ready(sock, lambda: sock.send(data)) :]  # noqa: B023
            while message := await when_ready(sock, lambda: sock.recv(256)):
                change = sum(1 if byte else -1 for byte in message)
                pulls += change
                agent.count_readers(change)
        finally:
            agent.count_readers(-pulls)


class NixlSource:
    """The memory of a peer, as one agent of this process reads it: into `pool`, if there is one, or
    into the region of this process."""

    def __init__(
        self,
        agent: RegionAgent,
        memory: NixlMemory,
        descriptor: RegionDescriptor,
        pool: MemoryRegion | None,
    ) -> None:
        self.agent = agent
        self.name = _agent_name(descriptor.incarnation)
        self._memory = memory
        self._descriptor = descriptor
        self._pool = pool
        self._pool_handles: tuple[Handle, Handle] = (None, None)
        self.lost = False
        self._pulls = 0
        self._is_remote = False
        """The agent knows the peer as a remote one."""
        self._lists: tuple[Handle, Handle] = (None, None)

    def add(self, stop: Event, agent: Agent) -> Steps:
        """Let the agent know the peer, prepare lists of its slots and generation numbers, and read
        a number, so that the first pull finds the network connected."""
        memory, count = self._memory, self._descriptor.slots
        if self._pool is not None:
            self._pool_handles = register_slots(agent, self._pool)
        if self.name != agent.name:  # not this agent itself
            agent.add_remote_agent(memory.agent)
            self._is_remote = True
        size = self._descriptor.slot_bytes
        slots = descriptors(memory.slots_address, size, count, memory.device)
        numbers = descriptors(memory.generations_address, GENERATION_BYTES, count)
        slots_list = agent.prep_xfer_dlist(self.name, slots, memory.memory_type)
        self._lists = slots_list, None  # forgotten, too, if the next call fails
        self._lists = slots_list, agent.prep_xfer_dlist(self.name, numbers, "DRAM")
        self._pulls += 1
        try:
            yield from self._read_numbers(agent, [SlotRead(0, 0, 0)], stop)
        finally:
            self._pulls -= 1

    def pull(self, reads: Sequence[SlotRead], limit: int, stop: Event, agent: Agent) -> Steps:
        """Copy the slots in transfers of `limit` bytes, then check their generations."""
        self._pulls += 1
        try:
            if self._pool is None:
                self.agent.region.settle([read.target for read in reads])
            sizes = [self._descriptor.slot_bytes] * len(reads)
            for group in group_pieces(sizes, limit, MAX_PIECES):
                part = reads[group]
                yield from self._read(agent, 0, [read.target for read in part], part, stop)
            for start in range(0, len(reads), STAGE_SLOTS):
                part = reads[start : start + STAGE_SLOTS]
                expected = [read.generation for read in part]
                present = yield from self._read_numbers(agent, part, stop)
                if present != expected and ANY_GENERATION not in expected:
                    text = "the peer uses a block for something else now"
                    raise TransferFailed.of("stale", text)
        finally:
            self._pulls -= 1

    def _read_numbers(
        self, agent: Agent, reads: Sequence[SlotRead], stop: Event
    ) -> Generator[None, None, Sequence[int]]:
        """Read the generation numbers of up to `STAGE_SLOTS` slots."""
        while not self.agent.free_stages:
            yield
        stage = self.agent.free_stages.pop()
        try:
            first = stage * STAGE_SLOTS
            yield from self._read(agent, 1, range(first, first + len(reads)), reads, stop)
            return self.agent.staged(stage, len(reads))
        finally:
            self.agent.free_stages.append(stage)

    def forget(self, agent: Agent) -> Steps:
        """Drop what the agent keeps of the peer, after the pulls in flight."""
        while self._pulls:
            yield
        registration, pool_list = self._pool_handles
        for handle in (*self._lists, pool_list):
            if handle is not None:
                agent.release_dlist_handle(handle)
        if registration is not None:
            agent.deregister_memory(registration)
        if self._is_remote:
            with suppress(*NIXL_ERRORS):  # a dead peer is gone from the agent already
                agent.remove_remote_agent(self.name)

    def _read(
        self,
        agent: Agent,
        kind: int,
        targets: Sequence[int],
        reads: Sequence[SlotRead],
        stop: Event,
    ) -> Steps:
        own = self._pool_handles[1] if kind == 0 else None
        sides = own or self.agent.own_lists[kind], self._lists[kind]
        ids = targets, [read.source for read in reads]
        try:
            yield from read(agent, self.name, sides, ids, stop)
        except NIXL_ERRORS:
            self.lost = True
            raise
        if stop.is_set():
            raise TransferFailed.of("gone", "the peer has ended")


class NixlLink:
    """The connection of a peer, and its memory as the agents know it. Both end together."""

    def __init__(self, sock: socket.socket, sources: Sequence[NixlSource]) -> None:
        self.sources = sources
        self.ended = False
        self.forgotten: list[Future[None]] = []
        """Ends of the agents' work on this link. Nothing uses the memory afterwards."""
        self.stops: set[Event] = set()
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._on_readable)

    def notify(self, message: bytes) -> None:
        """Tell the peer's process to answer the network, or that it need not any more."""
        if not self.ended:
            with suppress(OSError):
                self._sock.send(message)

    def end(self) -> None:
        """End the pulls in flight, because the process has ended or this end closes."""
        if self.ended:
            return
        self.ended = True
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        for stop in self.stops:
            stop.set()
        self.forgotten = _forget(self.sources)

    def _on_readable(self) -> None:
        try:
            ended = not self._sock.recv(256)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            ended = True
        if ended:
            self.end()


class NixlPeer(BackendPeer):
    """A process whose memory NIXL reads. A link that ended is opened again by the next pull."""

    def __init__(
        self, plane: NixlTransfer, descriptor: RegionDescriptor, region: MemoryRegion
    ) -> None:
        estimate = TransferEstimate(INITIAL_LATENCY_S, INITIAL_BYTES_PER_S)
        super().__init__(plane, descriptor, region, estimate)
        self._nixl = plane
        self._link: NixlLink | None = None
        self._dialling = asyncio.Lock()
        self._closed = False

    async def connect(self) -> NixlLink:
        """Return the link, opened if need be. Raises `TransferFailed`."""
        async with self._dialling:
            if self._closed:
                raise TransferFailed.of("gone", "this process closed its connection to the peer")
            if self._link is None or self._link.ended:
                self._link = await self._nixl.link(self.descriptor, self._region)
            return self._link

    async def _close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.end()
            await run_all(*map(wait_for_job, self._link.forgotten))

    async def _copy(self, reads: Sequence[SlotRead]) -> None:
        link, stop = await self.connect(), Event()
        ordered = sorted(reads, key=lambda read: read.source)  # consecutive slots are merged
        parts = self._divide(ordered, len(link.sources), MIN_PART_BYTES)
        limit = transfer_bytes(self._estimate.bytes_per_s)
        link.stops.add(stop)
        link.notify(PULL_BEGINS)
        try:
            jobs = [
                source.agent.run(partial(source.pull, part, limit, stop))
                for part, source in zip(parts, cycle(link.sources), strict=False)
            ]
            await run_all(*(wait_for_job(job, stop.set) for job in jobs))
        except TransferFailed as error:
            raise TransferFailed.of(error.reason, f"{self._name}: {error.message}") from None
        except NIXL_ERRORS as error:
            raise TransferFailed.of("gone", f"{self._name}: {error or 'disconnected'}") from None
        finally:
            link.stops.discard(stop)
            link.notify(PULL_ENDS)
            if any(source.lost for source in link.sources):
                link.end()


def _agent_name(incarnation: str, number: int = 0) -> str:
    """Name an agent of a process. Number 0 serves its peers."""
    return f"{incarnation}-{number}"


def _forget(sources: Sequence[NixlSource]) -> list[Future[None]]:
    """Let the agents drop what they keep of a peer, when their present work on it has ended."""
    return [source.agent.run(source.forget) for source in sources]


async def _receive_memory(sock: socket.socket) -> NixlMemory:
    """Receive the description of a peer's memory. Raises `OSError`, `EOFError`, `ProtocolError`."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
        part = await when_ready(sock, lambda: sock.recv(MAX_HELLO_BYTES))
        data += part
        if not part:
            raise EOFError("the connection closed")
        if len(data) > MAX_HELLO_BYTES:
            raise ProtocolError(f"a description of more than {MAX_HELLO_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(data[4:], type=NixlMemory)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"unreadable: {error}") from error
