"""`ResidentBlocks`: the blocks of a tier in memory and their slots, least recently used first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from dynamo.core.clock import Clock
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.values import Tier
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.tiers.block_table import NONE, BlockTable
from dynamo.inference.tiers.pins import BlockPins
from dynamo.inference.tiers.tier import TierBlock

NO_TOKENS = bytes(IDENTITY_BYTES)
MAX_HITS = 65_535


class ResidentBlocks:
    """The blocks in up to `capacity` slots. A slot enters the index after its bytes are there, and
    gets a new generation number before it is written.

    Reserved slots are being written; slots that are being loaded are not written before `end_load`.
    """

    def __init__(
        self, tier: Tier, capacity: int, clock: Clock, generations: memoryview | None = None
    ) -> None:
        """`generations`: numbers of the slots, if peers may read them."""
        self.capacity = capacity
        self.tier: Tier = tier
        self.events = KvEventBuffer(tier)
        self.pins = BlockPins(capacity, clock)
        self.evicted_blocks = 0
        self._generations = generations
        self._table = BlockTable()
        self._free: list[int] = []
        self._used = 0
        self._hits = array("H")
        self._tokens = bytearray()
        self._loading: dict[int, int] = {}
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block_hash: int) -> bool:
        return self._table.find(block_hash) != NONE

    def touch(self, block_hash: int) -> bool:
        """Make a block the last victim. Returns whether the index has it."""
        at = self._table.find(block_hash)
        if at == NONE:
            return False
        self._table.touch(at)
        return True

    def hits(self, block_hash: int) -> int:
        """Return how often a block was reused."""
        return self._hits[self._table.find(block_hash)]

    def begin_load(self, block: TierBlock) -> int:
        """Return the slot of a block until `end_load`; -1 if the index has none with its tokens."""
        at = self._table.find(block.block_hash)
        if at == NONE or self._tokens_at(at) != (block.tokens or NO_TOKENS):
            return -1
        self._loading[at] = self._loading.get(at, 0) + 1
        return at

    def end_load(self, block_hash: int, at: int, *, is_next_victim: bool) -> None:
        """Note that a load has ended: a reuse of the block."""
        self._loading[at] -= 1
        if not self._loading[at]:
            del self._loading[at]
            if at in self._dropped:
                self._dropped.remove(at)
                self._free.append(at)
        if self._table.find(block_hash) == at:
            self._hits[at] = min(self._hits[at] + 1, MAX_HITS)
            self._table.touch(at, is_oldest=is_next_victim)

    def reserve(self, count: int) -> list[int]:
        """Return up to `count` slots to write into. Evicts blocks that are not being loaded."""
        slots: list[int] = []
        while len(slots) < count and (self._free or self._add_slot() or self._evict()):
            at = self._free.pop()
            slots.append(at)
            if self._generations is not None:
                self._generations[at] += 1
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Free reserved slots."""
        self._free += slots

    def add(self, block: TierBlock, at: int) -> bool:
        """Put a block in a reserved slot into the index. False: it is here already, and the slot is
        free again."""
        if block.block_hash in self:
            self._free.append(at)
            return False
        self._table.insert(at, block.block_hash, block.parent_hash)
        self._hits[at] = min(block.hits, MAX_HITS)
        self._tokens[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES] = block.tokens or NO_TOKENS
        return True

    def remove_all(self) -> Sequence[int]:
        """Drop all blocks without events and return their hashes."""
        table, self._table = self._table, BlockTable()
        loading = self._loading
        self._dropped.update(loading)
        self._free += [at for at in table.oldest() if at not in loading]
        return table.hashes

    def held_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (parent hash, hash) of all blocks, also while the index changes."""
        return self._table.held_blocks()

    def check_invariants(self) -> None:
        """Raise AssertionError if a slot is lost or used twice. Call while nothing is copied."""
        used, free = [*self._table.oldest()], self._free
        violations = {
            "a slot is in use twice": len({*used, *free}) != len(used) + len(free),
            "a slot is lost": len(used) + len(free) != self._used,
            "too many blocks": self._used > self.capacity,
            "a load did not end": bool(self._loading or self._dropped),
        }
        if any(violations.values()):
            raise AssertionError("; ".join(name for name, broken in violations.items() if broken))

    def _tokens_at(self, at: int) -> bytearray:
        return self._tokens[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES]

    def _add_slot(self) -> bool:
        """Take a slot into use that never was."""
        if self._used >= self.capacity:
            return False
        self._free.append(self._used)
        self._used += 1
        self._hits.append(0)
        self._tokens += NO_TOKENS
        return True

    def _evict(self) -> bool:
        """Drop the least recently used block that is neither being loaded nor pinned."""
        at = self._table.find_victim(self._loading, self.pins)
        if at == NONE:
            return False
        self._drop(at)
        self.evicted_blocks += 1
        return True

    def _drop(self, at: int) -> None:
        self.events.add_removed(self._table.hashes[at])
        self._table.remove(at)
        self._free.append(at)
