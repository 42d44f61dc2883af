"""The pool of KV blocks of an engine: reference counts, the prefix cache, and KV events.

A block is in one of three states. A free block is in the free list. An owned block is referenced by
a sequence and not registered yet. A cached block is registered under its chained hash, so that
other sequences can reuse it; if no sequence references it, the eviction policy holds it.

The parent of a cached block is always cached: a sequence references the whole chain of its blocks
and releases a chain from its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier
from dynamo.inference.block import Block
from dynamo.inference.eviction import EvictionPolicy

if TYPE_CHECKING:
    from dynamo.inference.sequence import SequenceContent


class KvEventBuffer:
    """Collects KV events of one tier and joins neighbouring changes of a kind into one event."""

    def __init__(self, tier: Tier = "device") -> None:
        self._tier: Tier = tier
        self._events: list[KvEvent] = []
        self._hash_run: list[int] = []
        self._run_is_stored = True
        self._run_parent = 0

    def add_stored(self, parent: int, *block_hashes: int) -> None:
        """Record that blocks are cached now, each the parent of the next."""
        run = self._hash_run
        if not (run and self._run_is_stored and run[-1] == parent):
            self._end_run()
            self._run_is_stored = True
            self._run_parent = parent
            run = self._hash_run
        run += block_hashes

    def add_removed(self, *block_hashes: int) -> None:
        """Record that blocks are not cached any more."""
        if self._run_is_stored:
            self._end_run()
            self._run_is_stored = False
        self._hash_run += block_hashes

    def add_cleared(self) -> None:
        """Record that the cache is empty. Earlier events are dropped."""
        self._hash_run = []
        self._events = [BlocksCleared()]

    def drain(self) -> list[KvEvent]:
        """Return the events since the last call, in order."""
        if not (self._hash_run or self._events):
            return []
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if not self._hash_run:
            return
        hashes = tuple(self._hash_run)
        self._hash_run = []
        self._events.append(
            BlocksStored(self._run_parent, hashes, self._tier)
            if self._run_is_stored
            else BlocksRemoved(hashes, self._tier)
        )


class BlockPool:
    """All KV blocks of one engine. Not thread-safe."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        eviction: EvictionPolicy | None = None,
        prefix_caching: bool = True,
        generations: memoryview | None = None,
    ) -> None:
        """`generations`: numbers of the blocks' memory, one a block, if peers may read it."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free_blocks = self._blocks[::-1]
        self._cached_blocks: dict[int, Block] = {}
        self._evictable = EvictionPolicy() if eviction is None else eviction
        self._events = KvEventBuffer()
        self._generations = generations
        self.evictions = 0
        self.registrations = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free blocks and evictable blocks."""
        return len(self._free_blocks) + len(self._evictable)

    @property
    def free(self) -> int:
        """Blocks that `allocate` can return without an eviction."""
        return len(self._free_blocks)

    @property
    def active(self) -> int:
        """Blocks that sequences reference."""
        return self.num_blocks - len(self._free_blocks) - len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks in the prefix cache, referenced or not."""
        return len(self._cached_blocks)

    def match(
        self, hashes: Iterable[int], fingerprint: Callable[[int], int] | None = None
    ) -> list[Block]:
        """Return the cached blocks of the longest prefix of `hashes` with the fingerprints that
        `fingerprint(position)` returns. No state changes."""
        blocks: list[Block] = []
        get = self._cached_blocks.get
        for block_hash in hashes:
            block = get(block_hash)
            if block is None:
                break
            if fingerprint is not None and block.fingerprint != fingerprint(len(blocks)):
                break
            blocks.append(block)
        return blocks

    def next_victims(self, count: int) -> Iterable[Block]:
        """Yield up to `count` blocks in the order in which they would be evicted."""
        return self._evictable.peek(count)

    def count_unreferenced(self, blocks: Iterable[Block]) -> int:
        """Count the blocks that no sequence references. `reference` takes that many from
        `available`."""
        return sum(1 for block in blocks if not block.ref_count)

    def reference(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each of these cached blocks."""
        evictable = self._evictable
        for block in blocks:
            if not block.ref_count:
                evictable.remove(block)
            block.ref_count += 1
            block.hits += 1

    def allocate(self, count: int) -> list[Block]:
        """Return `count` blocks with one reference each. Evicts cached blocks if too few are free.
        The caller checks `available` first. IndexError or KeyError is raised if there are too
        few."""
        free = self._free_blocks
        if len(free) < count:
            self._evict(count - len(free))
        if count == 1:
            blocks = [free.pop()]
        elif count:
            blocks = free[: -count - 1 : -1]
            del free[-count:]
        else:
            blocks = []
        for block in blocks:
            block.ref_count = 1
        if self._generations is not None:
            for block in blocks:
                self._generations[block.id] += 1
        return blocks

    def register_chain(
        self, content: SequenceContent, blocks: list[Block], first: int, end: int
    ) -> None:
        """Put `blocks[first:end]`, the full blocks of `content` at these positions, into the prefix
        cache. Where the same content is cached already, the cached block takes the place of the one
        in the list, which is released. A block is not registered if its parent is not cached, or if
        other content has its hash."""
        content.ensure_hashes(end)
        if not self.prefix_caching or (first and not blocks[first - 1].cached):
            return
        hashes, index = content.hashes, first
        parent_hash = hashes[first - 1] if first else content.root
        find_or_add, new = self._cached_blocks.setdefault, first
        marks = zip(hashes[first:end], content.list_fingerprints(first, end), strict=True)
        for block, (block_hash, fingerprint) in zip(blocks[first:end], marks, strict=True):
            cached_block = find_or_add(block_hash, block)
            if cached_block is block and not block.cached:
                block.block_hash, block.parent_hash = block_hash, parent_hash
                block.fingerprint, block.cached, block.hits = fingerprint, True, 0
            else:
                self._add_stored(content, new, index)
                new = index + 1
                if cached_block.fingerprint != fingerprint:
                    return
                if cached_block is not block:
                    self.reference((cached_block,))
                    self.release((block,))
                    blocks[index] = cached_block
            parent_hash = block_hash
            index += 1
        self._add_stored(content, new, end)

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference from each block of a chain, tail first. `blocks` is in chain order."""
        free, evictable = self._free_blocks, []
        for block in reversed(blocks):
            block.ref_count = count = block.ref_count - 1
            if count:
                continue
            if block.cached:
                evictable.append(block)
            else:
                free.append(block)
        self._evictable.add(evictable)

    def clear(self) -> int:
        """Empty the prefix cache and return how many blocks it held. Running sequences keep their
        blocks, but other sequences cannot reuse them any more."""
        count = len(self._cached_blocks)
        self._free_blocks += self._evictable.pop(len(self._evictable))
        for block in self._cached_blocks.values():
            block.cached = False
        self._cached_blocks.clear()
        self._events.add_cleared()
        return count

    def take_events(self) -> list[KvEvent]:
        """Return the changes of the prefix cache since the last call, in order."""
        return self._events.drain()

    def dump_events(self) -> list[KvEvent]:
        """Return events that rebuild the present cache from an empty one, parents first."""
        buffer = KvEventBuffer()
        for block_hash, block in self._cached_blocks.items():
            buffer.add_stored(block.parent_hash, block_hash)
        return buffer.drain()

    def _add_stored(self, content: SequenceContent, first: int, end: int) -> None:
        """Note that the blocks of `content` at these positions are in the cache now."""
        if first < end:
            parent_hash = content.hashes[first - 1] if first else content.root
            self._events.add_stored(parent_hash, *content.hashes[first:end])
            self.registrations += end - first

    def _evict(self, count: int) -> None:
        victims, cached_blocks = self._evictable.pop(count), self._cached_blocks
        hashes = [block.block_hash for block in victims]
        for block, block_hash in zip(victims, hashes, strict=True):
            block.cached = False
            del cached_blocks[block_hash]
        self._events.add_removed(*hashes)
        self._free_blocks += victims
        self.evictions += count
