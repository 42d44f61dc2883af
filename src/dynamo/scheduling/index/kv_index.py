"""The KV index: a flat map from block hash to the set of workers that hold the block.

A chained hash names a whole prefix, and whoever holds a block holds the blocks above it, so no tree
is needed to find a match: along a prompt the sets only shrink, and where they do is found by
galloping and halving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dynamo.scheduling.index.branches import Branches
from dynamo.scheduling.index.worker_sets import WorkerSets

SHARDS: Final = 256
"""Parts of the map. A dict that grows copies itself at once: in parts, each copy is short."""

DEFAULT_BUDGET_BYTES: Final = 256 << 20
BLOCK_BYTES: Final = 108
"""Upper bound of a block in the map: 48 for its hash, up to 60 for its place just after a part has
grown."""

EVICT_BLOCKS: Final = 64
STEP_BLOCKS: Final = 6
"""Where sets change more often than that, going block by block is quicker than halving."""

Segment = tuple[int, int]
"""(depth, set): the workers of the set hold at least `depth` blocks, fewer of them hold more."""


class KvIndex:
    """Exact as far as it is told, within its budget. Not thread-safe; no clock, no I/O.

    Over `budget_bytes` the coldest branches are forgotten, tails first, so that what is left never
    tells of more than a worker holds.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self.blocks = 0
        self.evicted = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._gets: list[Callable[[int], int | None]] = [shard.get for shard in self._shards]
        self._sets = WorkerSets()
        self._branches = Branches()
        self._dropped = 0
        self._sweeping = 0
        self._swept = SHARDS

    @property
    def workers(self) -> Sequence[str]:
        """Every worker that has a number."""
        return self._sets.names

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory that the blocks take."""
        return BLOCK_BYTES * self.blocks + self._branches.bytes_used

    def number(self, worker: str) -> int:
        """The bit of a worker ("instance" or "instance/rank"), assigned on first use."""
        return self._sets.number(worker)

    def store(self, worker: str, parent: int, hashes: Sequence[int]) -> None:
        """`worker` holds this chain; its first block hangs under `parent` (0: the root)."""
        sets, shards = self._sets, self._shards
        bit = sets.one(1 << sets.number(worker))
        before = after = bit
        above, fresh = parent, []
        for block in hashes:
            shard = shards[block & 255]
            held = shard.get(block)
            if held is None:
                shard[block] = bit
                fresh.append(block)
                continue
            if fresh:
                self._grow(above, fresh)
                fresh = []
            if held is not before:
                before, after = held, sets.one(held | bit)
            if held is not after:
                shard[block] = after
            above = block
        if fresh:
            self._grow(above, fresh)
        self._tidy()

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """`worker` does not hold these blocks any more."""
        sets, shards = self._sets, self._shards
        bit = sets.bit(worker)
        before = after = 0
        gone = []
        for block in hashes:
            shard = shards[block & 255]
            held = shard.get(block)
            if held is None or not held & bit:
                continue
            if held == bit:
                del shard[block]
                gone.append(block)
                continue
            if held is not before:
                before, after = held, sets.one(held ^ bit)
            shard[block] = after
        self.blocks -= len(gone)
        self._branches.gone(gone)
        self._tidy()

    def clear(self, worker: str) -> None:
        """`worker` holds nothing."""
        self.drop(worker)

    def drop(self, worker: str) -> None:
        """`worker` is no more. Takes no time: its blocks are forgotten in steps, by and by."""
        self._dropped |= self._sets.drop(worker)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds (> 0 only)."""
        found: dict[str, int] = {}
        segments = self._segments(hashes) if hashes else ()
        if not segments:
            return found
        sets = self._sets
        rest, members = sets.live, sets.known
        for depth, held in reversed(segments):
            new = held & rest
            if new:
                rest ^= new
                names = members.get(new) or sets.members(new)
                if len(names) == 1:
                    found[names[0]] = depth
                else:
                    found.update(dict.fromkeys(names, depth))
        self._branches.touch(hashes[segments[-1][0] - 1])
        return found

    def holders(self, block: int) -> Sequence[str]:
        """The workers that hold a block."""
        return self._sets.members((self._gets[block & 255](block) or 0) & self._sets.live)

    def is_held(self, block: int) -> bool:
        """Whether anybody holds a block."""
        return bool((self._gets[block & 255](block) or 0) & self._sets.live)

    def holds(self, worker: str, block: int) -> bool:
        """Whether `worker` holds a block."""
        return bool((self._gets[block & 255](block) or 0) & self._sets.bit(worker))

    def held(self, worker: str) -> set[int]:
        """Every block of a worker. Walks the whole map."""
        bit = self._sets.bit(worker)
        return {block for shard in self._shards for block, held in shard.items() if held & bit}

    def chains(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Every block in chains (parent, blocks), the coldest first."""
        return self._branches.chains()

    def _segments(self, hashes: Sequence[int]) -> list[Segment]:
        """Where the sets along a prompt change, shallow ones first. Gallops to the end of what
        anybody holds, then halves what lies between two different sets."""
        gets = self._gets
        first = hashes[0]
        held = gets[first & 255](first)
        if held is None:
            return []
        last, low, low_held, high = len(hashes) - 1, 0, held, 1
        ahead: list[tuple[int, int | None]] = []
        while low < last:
            high = min(high, last)
            block = hashes[high]
            seen = gets[block & 255](block)
            if seen is None:
                ahead.append((high, None))
                break
            low, low_held, high = high, seen, 2 * high + 1
        ahead.append((low, low_held))
        return self._between(hashes, held, ahead)

    def _between(
        self, hashes: Sequence[int], held: int, ahead: list[tuple[int, int | None]]
    ) -> list[Segment]:
        gets = self._gets
        found: list[Segment] = []
        at = 0
        while ahead:
            there, seen = ahead[-1]
            if seen is held or seen == held:
                at = there
                ahead.pop()
            elif there - at <= 1:
                found.append((at + 1, held))
                if seen is None:
                    return found
                at, held = there, seen
                ahead.pop()
            elif at < STEP_BLOCKS * len(found):
                at += 1
                block = hashes[at]
                seen = gets[block & 255](block)
                if seen is not held and seen != held:
                    found.append((at, held))
                    if seen is None:
                        return found
                    held = seen
            else:
                middle = (at + there) >> 1
                block = hashes[middle]
                ahead.append((middle, gets[block & 255](block)))
        found.append((at + 1, held))
        return found

    def _grow(self, parent: int, blocks: Sequence[int]) -> None:
        self.blocks += len(blocks)
        self._branches.grow(parent, blocks)
        while self.bytes_used > self.budget_bytes:
            cold = self._branches.coldest(EVICT_BLOCKS)
            if not cold:
                return
            shards = self._shards
            forgotten = sum(shards[block & 255].pop(block, None) is not None for block in cold)
            self.blocks -= forgotten
            self.evicted += forgotten

    def _tidy(self) -> None:
        """Small steps: one part of the map forgets who was dropped."""
        if self._swept < SHARDS:
            self._sweep(self._shards[self._swept])
            self._swept += 1
            if self._swept == SHARDS:
                self._sets.forget(self._sweeping)
        elif self._dropped:
            self._sweeping, self._dropped, self._swept = self._dropped, 0, 0
        self._branches.tidy(self._is_known)

    def _sweep(self, shard: dict[int, int]) -> None:
        dropped, sets = self._sweeping, self._sets
        found = [(block, held) for block, held in shard.items() if held & dropped]
        gone = []
        for block, held in found:
            left = held & ~dropped
            if left:
                shard[block] = sets.one(left)
            else:
                del shard[block]
                gone.append(block)
        self.blocks -= len(gone)
        self._branches.gone(gone)

    def _is_known(self, block: int) -> bool:
        return block in self._shards[block & 255]
