"""KV memory in blocks: a fixed number of them, reference counts, and the prefix cache.

A block is free (on no list but the free one), owned (referenced, not yet full or not yet
registered), or held (registered under its chained hash, so that another sequence may hit it;
referenced or waiting in the eviction policy). Every held block's parent is held, because whoever
references a block references its whole chain, and a chain is given back tail first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo.inference.block import Block
from dynamo.inference.eviction import EvictionPolicy, LeastRecentlyUsed


class KvEventBuffer:
    """Gathers what changed since the last `take`, chains and removals as runs."""

    __slots__ = ("_events", "_hash_run", "_run_is_stored", "_run_parent")

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._hash_run: list[int] = []
        self._run_is_stored = True
        self._run_parent = 0

    def add_stored(self, parent: int, block_hash: int) -> None:
        """A block is held now."""
        run = self._hash_run
        if not (run and self._run_is_stored and run[-1] == parent):
            self._end_run()
            self._run_is_stored = True
            self._run_parent = parent
            run = self._hash_run
        run.append(block_hash)

    def add_removed(self, block_hash: int) -> None:
        """A block is not held any more."""
        if self._run_is_stored:
            self._end_run()
            self._run_is_stored = False
        self._hash_run.append(block_hash)

    def add_cleared(self) -> None:
        """Nothing is held any more: what came before does not matter."""
        self._hash_run = []
        self._events = [BlocksCleared()]

    def drain(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        if self._hash_run:
            self._end_run()
        events = self._events
        if events:
            self._events = []
        return events

    def _end_run(self) -> None:
        if not self._hash_run:
            return
        hashes = tuple(self._hash_run)
        self._hash_run = []
        self._events.append(
            BlocksStored(self._run_parent, hashes) if self._run_is_stored else BlocksRemoved(hashes)
        )


class BlockPool:
    """All KV blocks of one engine. Not thread-safe: the scheduler's alone."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        eviction: EvictionPolicy | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free_blocks = self._blocks[::-1]
        self._cached_blocks: dict[int, Block] = {}
        self._evictable: EvictionPolicy = LeastRecentlyUsed() if eviction is None else eviction
        self._events = KvEventBuffer()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and those that may be evicted."""
        return len(self._free_blocks) + len(self._evictable)

    @property
    def active(self) -> int:
        """Blocks that sequences reference."""
        return self.num_blocks - len(self._free_blocks) - len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks held under a hash, referenced or not."""
        return len(self._cached_blocks)

    def match(self, hashes: Iterable[int]) -> list[Block]:
        """The held blocks of the longest prefix of `hashes`. Changes nothing."""
        found: list[Block] = []
        get = self._cached_blocks.get
        for block_hash in hashes:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_unreferenced(self, blocks: Iterable[Block]) -> int:
        """How many of `blocks` no sequence references: referencing them uses up `available`."""
        return sum(1 for block in blocks if not block.ref_count)

    def reference(self, blocks: Iterable[Block]) -> None:
        """A sequence uses these held blocks, too."""
        idle = self._evictable
        for block in blocks:
            if not block.ref_count:
                idle.remove(block)
            block.ref_count += 1
            block.hits += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` blocks with one reference each, evicting where none are free.

        The caller has seen to it that `available` is enough; else IndexError or KeyError.
        """
        free = self._free_blocks
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
            block.ref_count = 1
        return taken

    def register(
        self, block: Block, parent_block: Block | None, parent_hash: int, block_hash: int
    ) -> Block:
        """`block` is full and hangs under `parent`, the hash of `above` (None: the chain's root).

        Returns the block to use from now on: another one where the same content is held already
        (`block` is free then). Nothing is registered under a block that is not held itself.
        """
        if not self.prefix_caching or not (parent_block is None or parent_block.cached):
            return block
        held = self._cached_blocks.get(block_hash)
        if held is not None:
            if held is not block:
                self.reference((held,))
                self.release((block,))
            return held
        block.block_hash, block.parent_hash = block_hash, parent_hash
        block.cached, block.hits = True, 0
        self._cached_blocks[block_hash] = block
        self._events.add_stored(parent_hash, block_hash)
        return block

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back one reference to each block of a chain (given in order; tails go first)."""
        idle, free = self._evictable, self._free_blocks
        for block in reversed(blocks):
            block.ref_count -= 1
            if not block.ref_count:
                if block.cached:
                    idle.add(block)
                else:
                    free.append(block)

    def clear(self) -> int:
        """Forget every cached block that no sequence references; how many. What running sequences
        hold stays theirs, but cannot be hit any more."""
        count = len(self._cached_blocks)
        while len(self._evictable):
            self._free_blocks.append(self._evictable.pop())
        for block in self._cached_blocks.values():
            block.cached = False
        self._cached_blocks.clear()
        self._events.add_cleared()
        return count

    def take_events(self) -> list[KvEvent]:
        """What became held or was removed since the last call, in order."""
        return self._events.drain()

    def dump_events(self) -> list[KvEvent]:
        """Events that rebuild the present state from nothing, parents first."""
        log = KvEventBuffer()
        for block_hash, block in self._cached_blocks.items():
            log.add_stored(block.parent_hash, block_hash)
        return log.drain()

    def check_invariants(self) -> None:
        """For tests: no block is lost, counted twice or in two places. Raises AssertionError."""
        check_pool_invariants(
            self._blocks, self._free_blocks, self._cached_blocks, len(self._evictable)
        )

    def _evict(self) -> None:
        block = self._evictable.pop()
        block.cached = False
        del self._cached_blocks[block.block_hash]
        self._events.add_removed(block.block_hash)
        self._free_blocks.append(block)
        self.evictions += 1


def check_pool_invariants(
    blocks: Sequence[Block], free: Sequence[Block], held: dict[int, Block], idle: int
) -> None:
    """Raises AssertionError where the lists of a pool contradict each other."""
    problems = [
        (len({id(block) for block in free}) != len(free), "a block is free twice"),
        (any(block.ref_count or block.cached for block in free), "a free block is in use"),
        (any(not held[key].cached or held[key].block_hash != key for key in held), "a wrong hash"),
        (any(block.ref_count < 0 for block in blocks), "a negative reference count"),
        (sum(block.cached for block in blocks) != len(held), "a held block is not in the map"),
        (
            sum(block.cached and not block.ref_count for block in blocks) != idle,
            "a lost idle block",
        ),
        (
            len(free) != sum(not block.ref_count and not block.cached for block in blocks),
            "a lost free block",
        ),
    ]
    found = [problem for wrong, problem in problems if wrong]
    if found:
        raise AssertionError("; ".join(found))
