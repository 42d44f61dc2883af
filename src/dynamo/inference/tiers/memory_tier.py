"""`MemoryTier`: a tier whose blocks lie in slots of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed
from dynamo.inference.sequence import EngineSequence
from dynamo.inference.tiers.copies import BlockCopies, RegionCopies
from dynamo.inference.tiers.resident_blocks import ResidentBlocks, SlotTier
from dynamo.inference.tiers.tier import TierBlock, TierCounters
from dynamo.inference.tiers.tier_source import LoadRun, describe_blocks


class MemoryTier(SlotTier):
    """Holds the blocks of `resident`, which `copies` moves. Simulated tiers may share their blocks.

    With `exclusive`, a block that was loaded is the next victim, because the engine has it now and
    offers it again before it is evicted there.
    """

    def __init__(
        self,
        resident: ResidentBlocks,
        copies: BlockCopies,
        *,
        block_bytes: int,
        source_generations: memoryview,
        exclusive: bool = True,
    ) -> None:
        """`source_generations`: numbers of the slots of the engine's blocks."""
        self.name = resident.tier
        self.block_bytes = block_bytes
        self.capacity_blocks = resident.capacity
        self.slots: ResidentBlocks = resident
        self.counters = TierCounters()
        self._copies = copies
        self._source_generations = source_generations
        self._exclusive = exclusive

    @classmethod
    def in_region(
        cls, region: MemoryRegion, first_slot: int, clock: Clock, *, exclusive: bool = True
    ) -> Self:
        """Make the host tier in the slots of `region` from `first_slot` on."""
        slots = region.slots - first_slot
        return cls(
            ResidentBlocks("host", slots, clock, region.generations[first_slot:]),
            RegionCopies(region, first_slot, clock),
            block_bytes=region.slot_bytes,
            source_generations=region.generations,
            exclusive=exclusive,
        )

    async def load(self, blocks: Sequence[TierBlock], on_loaded: Callable[[int], None]) -> None:
        resident = self.slots
        pairs: list[tuple[int, int]] = []
        for block in blocks:
            at = resident.begin_load(block)
            if at < 0:
                break
            pairs.append((block.slot, at))
        try:
            if pairs:
                await self._copies.load(pairs, on_loaded)
        finally:
            for block, (_, at) in zip(reversed(blocks[: len(pairs)]), reversed(pairs), strict=True):
                resident.end_load(block.block_hash, at, is_next_victim=self._exclusive)
        self.counters.loaded_blocks += len(pairs)
        if len(pairs) < len(blocks):
            raise TransferFailed.of("stale", f"the tier {self.name} lacks a block or its tokens")

    async def store(self, blocks: Sequence[TierBlock]) -> int:
        resident, generations = self.slots, self._source_generations
        wanted = [
            block
            for block in blocks
            if generations[block.slot] == block.generation and block.block_hash not in resident
        ]
        reserved = self._reserve(len(wanted))
        pairs = [(block.slot, at) for block, at in zip(wanted, reserved, strict=False)]
        clears = self.clears
        try:
            if pairs:
                await self._copies.store(pairs)
        except BaseException:
            resident.release(reserved)
            raise
        stored: list[TierBlock] = []
        for block, at in zip(wanted, reserved, strict=False):
            if generations[block.slot] != block.generation or clears != self.clears:
                resident.release((at,))
            elif resident.add(block, at):
                stored.append(block)
        self.counters.stored_blocks += len(stored)
        for block in reversed(stored):  # a chain comes with its tail first
            resident.events.add_stored(block.parent_hash, block.block_hash)
        return len(stored)

    @property
    def can_receive(self) -> bool:
        """Whether other tiers can load blocks into this one."""
        return self._copies.first_slot >= 0

    async def receive(self, sequence: EngineSequence, run: LoadRun) -> None:
        """Load a run of blocks of a sequence from another tier into this one. Raises
        `TransferFailed`; what came before stays."""
        resident, clears, added = self.slots, self.clears, 0
        reserved = self._reserve(run.blocks)
        slots = [self._copies.first_slot + at for at in reserved]
        blocks = describe_blocks(sequence, run.first, slots)

        def on_loaded(count: int) -> None:
            nonlocal added
            for block, at in zip(blocks[added:count], reserved[added:count], strict=True):
                if clears != self.clears:
                    resident.release((at,))
                elif resident.add(block, at):
                    resident.events.add_stored(block.parent_hash, block.block_hash)
                    self.counters.stored_blocks += 1
            added = count

        try:
            if blocks:
                await run.tier.load(blocks, on_loaded)
        finally:
            resident.release(reserved[added:])

    def _reserve(self, count: int) -> list[int]:
        evicted = self.slots.evicted_blocks
        reserved = self.slots.reserve(count)
        self.counters.evicted_blocks += self.slots.evicted_blocks - evicted
        return reserved

    def predict_load_s(self, blocks: int) -> float:
        return self._copies.predict_load_s(blocks)

    def _remove_all(self) -> Sequence[int]:
        return self.slots.remove_all()

    async def close(self) -> None:
        self._copies.close()
