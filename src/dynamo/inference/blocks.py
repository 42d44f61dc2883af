"""KV memory in blocks: a fixed number of them, reference counts, and the prefix cache.

A block is free (on no list but the free one), owned (referenced, not yet full or not yet
registered), or held (registered under its chained hash, so that another sequence may hit it;
referenced or waiting in the eviction policy). Every held block's parent is held, because whoever
references a block references its whole chain, and a chain is given back tail first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo.core.values import KvEvent
from dynamo.inference.block import Block
from dynamo.inference.event_log import EventLog
from dynamo.inference.eviction import Eviction, LeastRecentlyUsed


class BlockPool:
    """All KV blocks of one engine. Not thread-safe: the scheduler's alone."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        eviction: Eviction | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free = self._blocks[::-1]
        self._held: dict[int, Block] = {}
        self._idle: Eviction = LeastRecentlyUsed() if eviction is None else eviction
        self._log = EventLog()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and those that may be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def active(self) -> int:
        """Blocks that sequences reference."""
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks held under a hash, referenced or not."""
        return len(self._held)

    def match(self, hashes: Iterable[int]) -> list[Block]:
        """The held blocks of the longest prefix of `hashes`. Changes nothing."""
        found: list[Block] = []
        get = self._held.get
        for block_hash in hashes:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Iterable[Block]) -> int:
        """How many of `blocks` no sequence references: referencing them uses up `available`."""
        return sum(1 for block in blocks if not block.refs)

    def reference(self, blocks: Iterable[Block]) -> None:
        """A sequence uses these held blocks, too."""
        idle = self._idle
        for block in blocks:
            if not block.refs:
                idle.remove(block)
            block.refs += 1
            block.hits += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` blocks with one reference each, evicting where none are free.

        The caller has seen to it that `available` is enough; else IndexError or KeyError.
        """
        free = self._free
        while len(free) < count:
            self._evict()
        if count == 1:
            taken = [free.pop()]
        elif count:
            taken = free[: -count - 1 : -1]
            del free[-count:]
        else:
            taken = []
        for block in taken:
            block.refs = 1
        return taken

    def register(self, block: Block, above: Block | None, parent: int, block_hash: int) -> Block:
        """`block` is full and hangs under `parent`, the hash of `above` (None: the chain's root).

        Returns the block to use from now on: another one where the same content is held already
        (`block` is free then). Nothing is registered under a block that is not held itself.
        """
        if not self.prefix_caching or not (above is None or above.held):
            return block
        held = self._held.get(block_hash)
        if held is not None:
            if held is not block:
                self.reference((held,))
                self.release((block,))
            return held
        block.hash, block.parent = block_hash, parent
        block.held, block.hits = True, 0
        self._held[block_hash] = block
        self._log.stored(parent, block_hash)
        return block

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back one reference to each block of a chain (given in order; tails go first)."""
        idle, free = self._idle, self._free
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                if block.held:
                    idle.add(block)
                else:
                    free.append(block)

    def clear(self) -> int:
        """Forget every cached block that no sequence references; how many. What running sequences
        hold stays theirs, but cannot be hit any more."""
        count = len(self._held)
        while len(self._idle):
            self._free.append(self._idle.pop())
        for block in self._held.values():
            block.held = False
        self._held.clear()
        self._log.cleared()
        return count

    def take_events(self) -> list[KvEvent]:
        """What became held or was removed since the last call, in order."""
        return self._log.take()

    def held_blocks(self) -> list[KvEvent]:
        """Events that rebuild the present state from nothing, parents first."""
        log = EventLog()
        for block_hash, block in self._held.items():
            log.stored(block.parent, block_hash)
        return log.take()

    def check(self) -> None:
        """For tests: no block is lost, counted twice or in two places. Raises AssertionError."""
        check_pool(self._blocks, self._free, self._held, len(self._idle))

    def _evict(self) -> None:
        block = self._idle.pop()
        block.held = False
        del self._held[block.hash]
        self._log.removed(block.hash)
        self._free.append(block)
        self.evictions += 1


def check_pool(
    blocks: Sequence[Block], free: Sequence[Block], held: dict[int, Block], idle: int
) -> None:
    """Raises AssertionError where the lists of a pool contradict each other."""
    problems = [
        (len({id(block) for block in free}) != len(free), "a block is free twice"),
        (any(block.refs or block.held for block in free), "a free block is in use"),
        (any(not held[key].held or held[key].hash != key for key in held), "a wrong hash"),
        (any(block.refs < 0 for block in blocks), "a negative reference count"),
        (sum(block.held for block in blocks) != len(held), "a held block is not in the map"),
        (sum(block.held and not block.refs for block in blocks) != idle, "a lost idle block"),
        (
            len(free) != sum(not block.refs and not block.held for block in blocks),
            "a lost free block",
        ),
    ]
    found = [problem for wrong, problem in problems if wrong]
    if found:
        raise AssertionError("; ".join(found))
