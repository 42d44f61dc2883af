"""The slots of a tier and the blocks in them; `ResidentBlocks` are those in memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from dynamo.core.clock import Clock
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.values import KvEvent, Tier
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.tiers.block_table import NONE, BlockTable
from dynamo.inference.tiers.pins import BlockPins
from dynamo.inference.tiers.tier import KvTier, TierBlock

NO_TOKENS = bytes(IDENTITY_BYTES)
MAX_HITS = 65_535


class TierSlots:
    """The blocks in up to `capacity` slots, least recently used first in `table`.

    Reserved slots are being written, and enter the table after their bytes are there. Slots that
    are being read are not written before `end_read`, also if their block is removed meanwhile.
    """

    def __init__(self, tier: Tier, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self.tier: Tier = tier
        self.table = BlockTable()
        self.events = KvEventBuffer(tier)
        self.pins = BlockPins(capacity, clock)
        self.evicted_blocks = 0
        self._free: list[int] = []
        self._used = 0
        self._reading: Counter[int] = Counter()
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, block_hash: int) -> bool:
        return self.table.find(block_hash) != NONE

    def adopt(self, table: BlockTable) -> None:
        """Take over the blocks of a store that was filled before. All other slots are free."""
        self.table, dropped = table, self._dropped
        self._used = max(table.slots, 1 + max(dropped, default=-1))
        self._free = [at for at in range(self._used) if not table.in_use(at) and at not in dropped]

    def begin_read(self, at: int) -> None:
        """Keep a slot from being written."""
        self._reading[at] += 1

    def end_read(self, at: int) -> None:
        """Let a slot be written, if its block was removed and nobody else reads it."""
        self._reading[at] -= 1
        if not self._reading[at]:
            del self._reading[at]
            if at in self._dropped:
                self._dropped.remove(at)
                self._free.append(at)

    def reserve(self, count: int) -> list[int]:
        """Return up to `count` slots to write into. Evicts blocks that are not being read."""
        slots: list[int] = []
        while len(slots) < count and (self._free or self._add_slot() or self._evict()):
            slots.append(self._free.pop())
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Free reserved slots."""
        self._free += slots

    def remove(self, at: int) -> None:
        """Remove the block in a slot."""
        self.events.add_removed(self.table.hashes[at])
        self.table.remove(at)
        if at in self._reading:
            self._dropped.add(at)
        else:
            self._free.append(at)

    def remove_all(self) -> Sequence[int]:
        """Drop all blocks without events and return their hashes."""
        table, self.table = self.table, BlockTable()
        reading = self._reading
        self._dropped.update(reading)
        self._free += [at for at in table.oldest() if at not in reading]
        return table.hashes

    def _add_slot(self) -> bool:
        """Take a slot into use that never was."""
        if self._used >= self.capacity:
            return False
        self._free.append(self._used)
        self._used += 1
        return True

    def _evict(self) -> bool:
        """Remove the least recently used block that is neither being read nor pinned."""
        at = self.table.find_victim(self._reading, self.pins)
        if at == NONE:
            return False
        self.remove(at)
        self.evicted_blocks += 1
        return True


class SlotTier(KvTier):
    """A tier whose blocks lie in `slots`, and whose pins are those of the slots."""

    slots: TierSlots

    @property
    def blocks(self) -> int:
        return len(self.slots)

    @property
    def pins(self) -> BlockPins:  # type: ignore[override]
        return self.slots.pins

    def holds(self, block_hash: int) -> bool:
        return block_hash in self.slots

    def held_blocks(self) -> Iterator[tuple[int, int]]:
        return self.slots.table.held_blocks()

    def take_events(self) -> list[KvEvent]:
        return self.slots.events.drain()


class ResidentBlocks(TierSlots):
    """The blocks of a tier in memory, with how often each was reused and what identifies its
    tokens. A slot gets a new generation number before it is written."""

    def __init__(
        self, tier: Tier, capacity: int, clock: Clock, generations: memoryview | None = None
    ) -> None:
        """`generations`: numbers of the slots, if peers may read them."""
        super().__init__(tier, capacity, clock)
        self._generations = generations
        self._hits = array("H")
        self._tokens = bytearray()

    def touch(self, block_hash: int) -> bool:
        """Make a block the last victim. Returns whether the index has it."""
        at = self.table.find(block_hash)
        if at == NONE:
            return False
        self.table.touch(at)
        return True

    def hits(self, block_hash: int) -> int:
        """Return how often a block was reused."""
        return self._hits[self.table.find(block_hash)]

    def begin_load(self, block: TierBlock) -> int:
        """Return the slot of a block until `end_load`; -1 if the index has none with its tokens."""
        at = self.table.find(block.block_hash)
        tokens = self._tokens[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES]
        if at == NONE or tokens != (block.tokens or NO_TOKENS):
            return -1
        self.begin_read(at)
        return at

    def end_load(self, block_hash: int, at: int, *, is_next_victim: bool) -> None:
        """Note that a load has ended: a reuse of the block."""
        self.end_read(at)
        if self.table.find(block_hash) == at:
            self._hits[at] = min(self._hits[at] + 1, MAX_HITS)
            self.table.touch(at, is_oldest=is_next_victim)

    def reserve(self, count: int) -> list[int]:
        slots = super().reserve(count)
        if self._generations is not None:
            for at in slots:
                self._generations[at] += 1
        return slots

    def add(self, block: TierBlock, at: int) -> bool:
        """Put a block in a reserved slot into the index. False: it is here already, and the slot is
        free again."""
        if block.block_hash in self:
            self._free.append(at)
            return False
        self.table.insert(at, block.block_hash, block.parent_hash)
        self._hits[at] = min(block.hits, MAX_HITS)
        self._tokens[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES] = block.tokens or NO_TOKENS
        return True

    def _add_slot(self) -> bool:
        if not super()._add_slot():
            return False
        self._hits.append(0)
        self._tokens += NO_TOKENS
        return True
