"""The tiers below the device of a `KVCacheBlockManager`, and the moves into and between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from math import inf

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, TransferFailed
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.tasks import run_all
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
"""Most blocks on their way into a tier."""


class HeldBlock:
    """A block of the manager: its place in its chain, and its block on the device if it has one.
    `kv_block`: the block as the prefix tree has it."""

    def __init__(self, content: TokenContent, index: int, block: Block) -> None:
        content.ensure_hashes(index + 1)
        self.hash = content.hashes[index]
        self.parent = content.hashes[index - 1] if index else content.root
        self.identity = content.fingerprint(index).to_bytes(IDENTITY_BYTES)
        self.block: Block | None = block
        self.kv_block: KVBlock

    def at(self, slot: int, generation: int = 0) -> TierBlock:
        """Return the block as tiers take it, in a slot of the region."""
        return TierBlock(self.hash, self.parent, slot, generation, self.identity)


BlocksByHash = Mapping[int, Sequence[HeldBlock]]
"""Blocks of the same content by its hash. Lower tiers have one copy of each content."""
OnMoved = Callable[[HeldBlock, Tier], Awaitable[None]]


class NeededBlocks(BlockPins):
    """The blocks of the manager that are not on the device, in the tier that keeps them. The tier
    does not evict them. `blocks` has the held blocks by hash, the oldest first."""

    def __init__(self, capacity_blocks: int, clock: Clock) -> None:
        super().__init__(capacity_blocks, clock)
        self.capacity_blocks = capacity_blocks or inf
        self.blocks: dict[int, list[HeldBlock]] = {}

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def need(self, blocks: Iterable[HeldBlock]) -> None:
        """Keep these blocks as the newest ones."""
        for held in blocks:
            self.blocks[held.hash] = [*self.blocks.pop(held.hash, ()), held]

    def forget(self, blocks: Iterable[HeldBlock]) -> None:
        """Keep these blocks no more, if they were kept."""
        for held in blocks:
            same = self.blocks.get(held.hash, [])
            if held in same:
                same.remove(held)
                if not same:
                    del self.blocks[held.hash]


class LowerTiers:
    """Keeps blocks in `tiers`, the fastest first. A full tier gives its oldest needed blocks to the
    tier below; those of the last one are lost. The slots of `region` from `first_staging` on are
    for moves between tiers. The manager calls one method at a time."""

    def __init__(
        self,
        tiers: Sequence[LibraryTier],
        region: MemoryRegion,
        first_staging: int,
        clock: Clock,
        on_moved: OnMoved,
    ) -> None:
        """`on_moved` is called with each block and its new tier."""
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
            needed.forget([held])

    async def load(self, held: HeldBlock, slot: int) -> None:
        """Copy a block into a slot of the region. Raises `TransferFailed`."""
        source = self.find(held)
        if source is None:
            raise TransferFailed.of("gone", "no tier holds the block any more")
        await source.load([held.at(slot)], lambda _: None)

    async def store(
        self, blocks: BlocksByHash, target: str, moving: Iterable[int] = ()
    ) -> Mapping[int, DynamoError]:
        """Copy blocks into a tier, which keeps them until `forget`. Returns the errors by hash.
        `moving`: hashes of further blocks that must stay where they are."""
        backend, needed = self._backends[target], self._needed[target]
        errors: dict[int, DynamoError] = {}
        new = [block_hash for block_hash in blocks if not backend.holds(block_hash)]
        for block_hash in blocks.keys() - set(new):  # else the new ones might evict these
            await self._keep(blocks[block_hash], target)
        at_once = int(min(needed.capacity_blocks, STORES_AT_ONCE))
        for start in range(0, len(new), at_once):
            batch = new[start : start + at_once]
            await self._make_room(target, len(batch), {*new[start:], *moving})
            for block_hash in batch:
                needed.need(blocks[block_hash])
            results = await run_all(*(self._store(blocks[each], target) for each in batch))
            for block_hash, error in zip(batch, results, strict=True):
                needed.forget(blocks[block_hash])
                if error is None:
                    await self._keep(blocks[block_hash], target)
                else:
                    errors[block_hash] = error
        return errors

    async def _keep(self, same: Sequence[HeldBlock], target: str) -> None:
        """Note that the tier has the blocks, which no other one need keep."""
        for needed in self._needed.values():
            needed.forget(same)
        self._needed[target].need(same)
        for held in same:
            await self._on_moved(held, self._backends[target].name)

    async def _store(self, same: Sequence[HeldBlock], target: str) -> DynamoError | None:
        """Copy what `same` blocks have in common into a tier. Returns the error."""
        backend, held = self._backends[target], same[0]
        on_device = next((each.block.id for each in same if each.block is not None), None)
        try:
            async with self._slot_of(held, on_device) as slot:
                generation = self._region.generations[slot]
                await backend.store([held.at(slot, generation)])
        except DynamoError as error:
            return error
        if backend.holds(held.hash):
            return None
        reason = backend.problem or "it is full"
        return TransferFailed.of("refused", f"{target} takes no block: {reason}")

    async def _make_room(self, name: str, count: int, moving: set[int]) -> None:
        """Move the oldest needed blocks that are not `moving` down, until `count` more have room.
        Each goes to the first tier that takes it; without one, it is lost."""
        needed = self._needed[name]
        surplus = len(needed) + count - needed.capacity_blocks
        if surplus <= 0:
            return
        oldest = (each for each in needed.blocks.items() if each[0] not in moving)
        leaving: BlocksByHash = {
            block_hash: tuple(same) for block_hash, same in islice(oldest, int(surplus))
        }
        names = list(self._backends)
        for below in names[names.index(name) + 1 :]:
            errors = await self.store(leaving, below, moving)
            leaving = {block_hash: leaving[block_hash] for block_hash in errors}
        for same in leaving.values():
            needed.forget(same)

    @asynccontextmanager
    async def _slot_of(self, held: HeldBlock, on_device: int | None) -> AsyncIterator[int]:
        """Return the slot of a block, which is loaded into one if it is not on the device."""
        if on_device is not None:
            yield on_device
            return
        slot = await self._staging.get()
        try:
            await self.load(held, slot)
            yield slot
        finally:
            self._staging.put_nowait(slot)
