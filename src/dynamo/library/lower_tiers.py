"""The tiers below the device of a `KVCacheBlockManager`, and the moves into and between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.values import Tier
from dynamo.inference.block import Block
from dynamo.inference.sequence import TokenContent
from dynamo.inference.tiers.pins import BlockPins
from dynamo.inference.tiers.tier import KvTier, TierBlock
from dynamo.library.memory_tiers import LibraryTier
from dynamo.library.radix_tree import KVBlock

STAGING_SLOTS = 4
"""Slots of the region through which blocks go from one lower tier to another."""
STORES_AT_ONCE = 64
"""Blocks on their way into a tier of unknown capacity."""


OnMoved = Callable[["HeldBlock", Tier], Awaitable[None]]


class MoveLock(asyncio.Lock):
    """The lock of a block's moves. `users`: how many tasks hold it or wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.users = 0

    async def __aenter__(self) -> None:
        self.users += 1
        try:
            await self.acquire()
        except BaseException:
            self.users -= 1
            raise

    async def __aexit__(self, *error: object) -> None:
        self.users -= 1
        self.release()


class HeldBlock:
    """A block of the manager: its place in its chain, and its block on the device if it has one.
    `kv_block`: the block as the prefix tree has it.
    A move and `free` hold its `lock`, which blocks of the same content share."""

    def __init__(
        self,
        content: TokenContent,
        index: int,
        block: Block,
        locks: MutableMapping[int, MoveLock],
    ) -> None:
        content.ensure_hashes(index + 1)
        self.hash = content.hashes[index]
        self.parent = content.hashes[index - 1] if index else content.root
        self.identity = content.fingerprint(index).to_bytes(IDENTITY_BYTES)
        self.block: Block | None = block
        self.kv_block: KVBlock | None = None
        self.lock = locks.setdefault(self.hash, MoveLock())

    def at(self, slot: int, generation: int = 0) -> TierBlock:
        """Return the block as tiers take it, in a slot of the region."""
        return TierBlock(self.hash, self.parent, slot, generation, self.identity)


class NeededBlocks(BlockPins):
    """The blocks of the manager that are not on the device, in the tier that keeps them. The tier
    does not evict them. `blocks` has the held blocks by hash, the oldest first. `arriving`: blocks
    on their way into the tier, each of which has one of `places`."""

    def __init__(self, capacity_blocks: int, clock: Clock) -> None:
        super().__init__(capacity_blocks, clock)
        self.capacity_blocks = capacity_blocks or inf
        self.blocks: dict[int, list[HeldBlock]] = {}
        self.arriving = 0
        self.places = asyncio.Semaphore(max(1, capacity_blocks or STORES_AT_ONCE))
        self._leaving: set[int] = set()

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.blocks or block_hash in self._leaving

    def __len__(self) -> int:
        return len(self.blocks) + len(self._leaving)

    @property
    def is_full(self) -> bool:
        """Whether the blocks on their way find no place but those of needed ones."""
        return len(self.blocks) + self.arriving > self.capacity_blocks

    def need(self, blocks: Iterable[HeldBlock]) -> None:
        """Keep these blocks."""
        for held in blocks:
            self.blocks.setdefault(held.hash, []).append(held)

    def forget(self, held: HeldBlock) -> None:
        """Keep a block no more, if it was kept."""
        same = self.blocks.get(held.hash, [])
        if held in same:
            same.remove(held)
            if not same:
                del self.blocks[held.hash]

    @asynccontextmanager
    async def oldest(self) -> AsyncIterator[list[HeldBlock]]:
        """Take the oldest needed blocks of one content that nobody moves, none if all are moved.
        The blocks keep their place meanwhile."""
        unused = (same for same in self.blocks.values() if not same[0].lock.users)
        if not (same := next(unused, [])):
            yield same
            return
        block_hash = same[0].hash
        async with same[0].lock:  # does not wait
            del self.blocks[block_hash]
            self._leaving.add(block_hash)
            try:
                yield same
            finally:
                self._leaving.discard(block_hash)


class LowerTiers:
    """Keeps blocks in `tiers`, the fastest first. A full tier gives its oldest needed blocks to the
    tier below; those of the last one are lost. The slots of `region` from `first_staging` on are
    for moves between tiers."""

    def __init__(
        self,
        tiers: Sequence[LibraryTier],
        region: MemoryRegion,
        first_staging: int,
        clock: Clock,
        on_moved: OnMoved,
    ) -> None:
        """`on_moved` is called with each block that had to leave a full tier."""
        self._on_moved = on_moved
        self._region = region
        self._staging: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(first_staging, first_staging + STAGING_SLOTS):
            self._staging.put_nowait(slot)
        self._backends: dict[str, KvTier] = {}
        self._needed: dict[str, NeededBlocks] = {}
        for tier in tiers:
            if tier.backend is not None:
                self._backends[tier.name] = tier.backend
                needed = NeededBlocks(tier.backend.capacity_blocks, clock)
                self._needed[tier.name] = needed
                tier.pin(needed)

    def find(self, held: HeldBlock) -> KvTier | None:
        """Return the fastest tier that holds a block."""
        return next((each for each in self._backends.values() if each.holds(held.hash)), None)

    def forget(self, held: HeldBlock) -> None:
        """Note that a block is on the device or freed; its copy may be evicted."""
        for needed in self._needed.values():
            needed.forget(held)

    async def load(self, held: HeldBlock, slot: int) -> None:
        """Copy a block into a slot of the region. Raises `TransferFailed`."""
        source = self.find(held)
        if source is None:
            raise TransferFailed.of("gone", "no tier holds the block any more")
        await source.load([held.at(slot)], lambda _: None)

    async def store(self, held: HeldBlock, target: str, slot: int) -> None:
        """Copy a block out of a slot of the region into a tier, which keeps it until `forget`.
        Raises `TransferFailed`. The caller holds the block's lock."""
        if self._backends[target].holds(held.hash):
            self._needed[target].need([held])
            return
        async with self._place(target):
            await self._write([held], target, slot)

    async def move(self, held: HeldBlock, target: str) -> None:
        """Move a block to another lower tier. Raises `TransferFailed`. The caller holds the block's
        lock."""
        others = [needed for name, needed in self._needed.items() if name != target]
        if self._backends[target].holds(held.hash):
            self._needed[target].forget(held)
            self._needed[target].need([held])
        else:
            async with self._place(target), self._staged(held) as slot:
                await self._write([held], target, slot)
        for needed in others:
            needed.forget(held)

    async def _write(self, blocks: Sequence[HeldBlock], target: str, slot: int) -> None:
        """Copy what `blocks` have in common out of a slot into a tier that has a place for it."""
        backend, held = self._backends[target], blocks[0]
        generation = self._region.generations[slot]
        if not (backend.holds(held.hash) or await backend.store([held.at(slot, generation)])):
            reason = backend.problem or "it is full"
            raise TransferFailed.of("refused", f"{target} takes no block: {reason}")
        self._needed[target].need(blocks)

    @asynccontextmanager
    async def _place(self, name: str) -> AsyncIterator[None]:
        """Reserve a place in a tier. If needed blocks have all, the oldest goes one tier down. The
        tasks that wait here wait for tiers further down only."""
        needed = self._needed[name]
        async with needed.places:
            needed.arriving += 1
            try:
                if needed.is_full:
                    async with needed.oldest() as blocks:
                        if blocks:
                            await self._move_down(blocks, name)
                yield
            finally:
                needed.arriving -= 1

    async def _move_down(self, blocks: Sequence[HeldBlock], name: str) -> None:
        """Copy a block to the first tier below `name` that takes it; without one, it is lost."""
        names = list(self._backends)
        for below in names[names.index(name) + 1 :]:
            with suppress(TransferFailed):
                async with self._place(below), self._staged(blocks[0]) as slot:
                    await self._write(blocks, below, slot)
                for held in blocks:
                    await self._on_moved(held, self._backends[below].name)
                return

    @asynccontextmanager
    async def _staged(self, held: HeldBlock) -> AsyncIterator[int]:
        """Load a block into a slot for the time of a move."""
        slot = await self._staging.get()
        try:
            await self.load(held, slot)
            yield slot
        finally:
            self._staging.put_nowait(slot)
