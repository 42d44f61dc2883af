"""Pulls from peers whose blocks lie otherwise in memory: into a pool first, then converted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, Self

from dynamo.communication.transfer.layout import KvLayout, convert_piece
from dynamo.communication.transfer.plane import RegionPeer
from dynamo.communication.transfer.region import MemoryRegion, SlotRead
from dynamo.communication.transfer.threads import CopyThreads
from dynamo.core.errors import InternalError, TransferFailed

DEFAULT_POOL_BYTES: Final = 16 << 20


class MemoryPool:
    """Slots of a region that are lent for a while."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        self._free = list(range(region.slots))
        self._lent: set[int] = set()
        self._returned = asyncio.Event()

    @classmethod
    def allocate(cls, slot_bytes: int, size_bytes: int = 0) -> Self:
        """Make a pool of one slot or more in `size_bytes`; 0: in `DEFAULT_POOL_BYTES`."""
        slots = max(1, (size_bytes or DEFAULT_POOL_BYTES) // slot_bytes)
        return cls(MemoryRegion.allocate(slots, slot_bytes))

    @property
    def free_slots(self) -> int:
        """The number of slots that nobody uses."""
        return len(self._free)

    async def take(self, count: int) -> list[int]:
        """Lend 1 to `count` slots. Waits while there is none."""
        while not self._free:
            self._returned.clear()
            await self._returned.wait()
        slots, self._free = self._free[:count], self._free[count:]
        self._lent.update(slots)
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Take slots back. Slots that are not lent, or no more, are ignored."""
        for slot in slots:
            if slot in self._lent:
                self._lent.remove(slot)
                self._free.append(slot)
        self._returned.set()


class ConvertedPeer(RegionPeer):
    """A peer whose blocks are pulled into `pool`, then converted into slots of `region`."""

    def __init__(self, peer: RegionPeer, pool: MemoryPool, region: MemoryRegion) -> None:
        source, target = peer.descriptor.kv, region.kv_layout
        if source is None or target is None:
            raise InternalError("blocks of an unknown layout cannot be converted")
        self.descriptor = peer.descriptor
        self.backend = peer.backend
        self._layouts: tuple[KvLayout, KvLayout] = (source, target)
        self._peer = peer
        self._pool = pool
        self._region = region
        self._threads = CopyThreads("convert", 1)

    @property
    def available(self) -> bool:
        return self._peer.available

    def predict_s(self, size_bytes: int) -> float:
        return self._peer.predict_s(size_bytes)

    async def pull(self, reads: Sequence[SlotRead], timeout_s: float | None = None) -> None:
        if not all(0 <= read.target < self._region.slots for read in reads):
            raise TransferFailed.of("refused", "this process has no such slots")
        pieces: dict[tuple[int, int], list[SlotRead]] = {}  # a slot with several is pulled once
        for read in reads:
            pieces.setdefault((read.source, read.generation), []).append(read)
        sources = list(pieces)
        start = 0
        while start < len(sources):
            slots = await self._pool.take(len(sources) - start)
            part = sources[start : start + len(slots)]
            start += len(slots)
            try:
                pairs = zip(part, slots, strict=True)
                await self._peer.pull(
                    [SlotRead(*source, slot) for source, slot in pairs], timeout_s
                )
                arrived = [pieces[source] for source in part]
                await self._threads.run(partial(self._convert, arrived, slots))
            finally:
                self._pool.release(slots)

    async def close(self) -> None:
        await self._peer.close()
        self._threads.close()
        self._pool.region.close()

    def _convert(self, pieces: Sequence[Sequence[SlotRead]], slots: Sequence[int]) -> None:
        source, target = self._layouts
        keeps = source.block_tokens != target.block_tokens
        for reads, slot in zip(pieces, slots, strict=True):
            block = self._pool.region.slot(slot)
            with self._region.writing([read.target for read in reads], keeps=keeps) as views:
                for read, into in zip(reads, views, strict=True):
                    tokens = read.source_token, read.target_token
                    convert_piece(source, block, target, into, *tokens)
