"""Prepared weights of workers of other hosts: a start reads them from a peer's memory by the
transfer plane, instead of preparing them from the file. The file is read if no peer delivers."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_128

from dynamo.communication.transfer.region import (
    MemoryRegion,
    RegionDescriptor,
    SlotRead,
    memory_offset,
)
from dynamo.core.errors import DECODE_ERRORS, DynamoError, TransferFailed
from dynamo.runtime.shared_memory import SEALS

if TYPE_CHECKING:
    from dynamo.communication.transfer import TransferPlane
    from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20
MAX_PEERS = 2
"""Peers that one start asks, one after the other."""
MIN_BYTES_PER_S = 100e6
"""A slower peer saves no time: preparing the weights takes about as long."""
CONNECT_S = 2.0


class WeightsRecord(msgspec.Struct, frozen=True):
    """The weights of a worker, under their content key in discovery. `digest` is that of all slots
    of the region."""

    region: RegionDescriptor
    digest: str


class WeightPeers:
    """Reads weights of peers, and offers those of this process from the end of its start until it
    sleeps or ends."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._read_key: Callable[[], str] = str
        self._plane: TransferPlane | None = None
        self._task: asyncio.Task[None] | None = None
        self._key = ""

    def fetch(self, key: str, limit_bytes: int) -> int:
        """Return a descriptor of sealed memory with the weights of a content key, or -1. Any thread
        but that of the event loop may call this. Blocks."""
        try:
            fetch = self._fetch(key, limit_bytes)
            return asyncio.run_coroutine_threadsafe(fetch, self._loop).result()
        except (DynamoError, OSError) as error:
            fields = {"error": str(error)}
            log.warning("weights are not read from peers", extra={"fields": fields})
            return -1

    def hold(self, fd: int, read_key: Callable[[], str]) -> None:
        """Take over the descriptor of the weights that the process uses. `read_key` returns their
        content key, and blocks."""
        self.release()
        self._fd, self._read_key = fd, read_key

    def release(self) -> None:
        """Give the descriptor back, which nobody is offered any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def start_offer(self) -> None:
        """Offer the weights in the background, as long as the process uses them."""
        if self._task is None and self._fd >= 0:
            self._task = self._runtime.tasks.start(self._offer(), "offer of weights")

    async def withdraw(self) -> None:
        """Offer the weights no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._plane is not None:
            plane, self._plane = self._plane, None
            await self._runtime.discovery.delete(self._key)
            await plane.close()

    def _prefix(self, key: str) -> str:
        return f"/{self._runtime.settings.runtime.namespace}/weights/{key}/"

    async def _offer(self) -> None:
        """Let peers read the memory. A process that cannot offers nothing."""
        runtime = self._runtime
        try:
            key = await runtime.clock.offload(self._read_key)
            region = _map_region(self._fd)
            try:
                digest = await runtime.clock.offload(_digest, region)
                self._plane = await runtime.open_transfer()
                descriptor = await self._plane.expose(region, key)
            finally:
                region.close()  # the plane keeps it until its own end
            self._key = self._prefix(key) + runtime.instance_id
            record = WeightsRecord(descriptor, digest)
            await runtime.discovery.put(self._key, msgspec.json.encode(record))
        except (DynamoError, OSError) as error:
            fields = {"error": str(error)}
            log.warning("weights are not offered to other hosts", extra={"fields": fields})

    async def _fetch(self, key: str, limit_bytes: int) -> int:
        async with asyncio.timeout(CONNECT_S):
            values = list((await self._runtime.discovery.get(self._prefix(key))).items())
        self._runtime.rng.shuffle(values)
        for name, value in values[:MAX_PEERS]:
            began, peer = self._runtime.clock.now(), name.rpartition("/")[2]
            try:
                record = msgspec.json.decode(value, type=WeightsRecord)
                if record.region.slots * record.region.slot_bytes > limit_bytes + SLOT_BYTES:
                    raise TransferFailed.of("refused", "the peer's weights are too large")
                fd = await self._pull(key, record)
            except (*DECODE_ERRORS, DynamoError, OSError, TimeoutError) as error:
                fields = {"peer": peer, "error": str(error) or type(error).__name__}
                log.warning("a peer does not deliver its weights", extra={"fields": fields})
                continue
            facts = {
                "peer": peer,
                "mb": os.fstat(fd).st_size // 1_000_000,
                "seconds": round(self._runtime.clock.now() - began, 3),
            }
            log.info("weights are read from a peer", extra={"fields": facts})
            return fd
        return -1

    async def _pull(self, key: str, record: WeightsRecord) -> int:
        """Return a descriptor of the weights of a peer, which are checked and sealed."""
        slots = record.region.slots
        if record.region.slot_bytes != SLOT_BYTES:
            raise TransferFailed.of("refused", "the peer divides weights in another way")
        region = _allocate_region(slots)
        fd = os.dup(region.fd)
        try:
            plane = await self._runtime.open_transfer()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await plane.expose(region, key)
                    peer = await plane.connect(record.region)
                timeout_s = CONNECT_S + slots * SLOT_BYTES / MIN_BYTES_PER_S
                await peer.pull([SlotRead(slot, 0, slot) for slot in range(slots)], timeout_s)
            finally:
                await plane.close()
            await self._runtime.clock.offload(_check, region, record.digest)
            region.close()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            region.close()
            os.close(fd)
            raise
        return fd


def _allocate_region(slots: int) -> MemoryRegion:
    fd = os.memfd_create("dynamo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, memory_offset(slots) + slots * SLOT_BYTES)
    return MemoryRegion(slots, SLOT_BYTES, fd, mmap.mmap(fd, 0))


def _map_region(fd: int) -> MemoryRegion:
    """Map sealed memory, which has the form of a region. Its pages are not copied."""
    size = os.fstat(fd).st_size
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    buffer = mmap.mmap(fd, size, flags=flags, prot=protection)
    return MemoryRegion(size // SLOT_BYTES, SLOT_BYTES, os.dup(fd), buffer)


def _check(region: MemoryRegion, digest: str) -> None:
    if _digest(region) != digest:
        raise TransferFailed.of("checksum", "the weights are not those of the record")


def _digest(region: MemoryRegion) -> str:
    return xxh3_128(region.memory).hexdigest()
