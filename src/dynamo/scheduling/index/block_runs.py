"""Runs of blocks, their anchors, and their least-recently-used order for eviction.

A run is a stretch of a hash chain, 8 bytes a block. Other runs may be children of any of its
blocks. A worker holds a run up to some depth, because a held block implies the blocks above it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

RUN_BYTES: Final = 440
RUN_BLOCK_BYTES: Final = 9
HOLDER_BYTES: Final = 320
"""Upper bounds for a run, for a block in it, and for each holder beyond the first."""

SWEEP_CURSOR: Final = 0
COPY_CURSOR: Final = 1

_SHARED_INTS: Final = tuple(range(4_096))
"""Shared int objects for depths: copying the depths of a run then hits the CPU cache."""


def match_length(blocks: Sequence[int], position: int, hashes: Sequence[int], start: int) -> int:
    """Return how many of `blocks` from `position` equal `hashes` from `start`, at least one.

    A binary search suffices, because equal chained hashes imply equal hashes before them.
    """
    high = min(len(blocks) - position, len(hashes) - start)
    if blocks[position + high - 1] == hashes[start + high - 1]:
        return high
    low = 1
    while high - low > 1:
        middle = (low + high) >> 1
        if blocks[position + middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low


class BlockRun:
    """A stretch of a hash chain below the block `parent`, and its holders.

    `holder_bits` is the set of workers that hold any of it. `may_repeat_blocks`: some blocks may
    be in another run, too. `last_copy` is the number of the last copy that contains the run.
    Depths are stored as ends counted from the chain's root, at `_root_offset` above the run.
    """

    __slots__ = (
        "_holder_ends",
        "_owner",
        "_owner_end",
        "_root_offset",
        "hashes",
        "holder_bits",
        "last_copy",
        "lru_next",
        "lru_previous",
        "may_repeat_blocks",
        "number",
        "parent",
    )

    lru_previous: BlockRun
    lru_next: BlockRun

    def __init__(
        self, number: int, parent: int, owner: str, owner_bit: int, hashes: Sequence[int] = ()
    ) -> None:
        self.number = number
        self.parent = parent
        self.hashes = array("Q", hashes)
        self.holder_bits = owner_bit
        self.may_repeat_blocks = False
        self.last_copy = 0
        self._root_offset = 0
        self._owner = owner
        self._owner_end = len(hashes)
        self._holder_ends: dict[str, int] | None = None

    @property
    def holder_count(self) -> int:
        """The number of workers that hold any of it."""
        return 1 if self._holder_ends is None else len(self._holder_ends)

    @property
    def depths(self) -> Mapping[str, int]:
        """worker -> how many of the blocks it holds."""
        ends, start = self._holder_ends, self._root_offset
        if ends is None:
            return {self._owner: self._owner_end - start}
        return {worker: end - start for worker, end in ends.items()}

    def get_depth(self, worker: str) -> int:
        """Return how many of the blocks a worker holds."""
        ends, start = self._holder_ends, self._root_offset
        if ends is None:
            return self._owner_end - start if worker == self._owner else 0
        return ends.get(worker, start) - start

    def set_depth(self, name: str, bit: int, depth: int) -> int:
        """Set how many blocks a worker holds. Return the change of the number of holders."""
        if depth:
            self.holder_bits |= bit
        else:
            self.holder_bits &= ~bit
        end = self._root_offset + depth
        if end < len(_SHARED_INTS):
            end = _SHARED_INTS[end]
        ends = self._holder_ends
        if ends is None:
            if name == self._owner:
                self._owner_end = end
                return 0
            self._holder_ends = ends = (
                {self._owner: self._owner_end} if self._owner_end > self._root_offset else {}
            )
            before = 1
        else:
            before = len(ends)
        if depth:
            ends[name] = end
        else:
            ends.pop(name, None)
        return len(ends) - before

    def append_blocks(self, hashes: Sequence[int]) -> None:
        """Append blocks that the only holder holds."""
        self.hashes.extend(hashes)
        end = self._root_offset + len(self.hashes)
        if self._holder_ends is None:
            self._owner_end = end
        else:
            for name in self._holder_ends:
                self._holder_ends[name] = end

    def find_max_depth(self) -> int:
        """Return the largest depth of any holder."""
        if self._holder_ends is None:
            return self._owner_end - self._root_offset
        return max(self._holder_ends.values(), default=self._root_offset) - self._root_offset

    def truncate(self, length: int) -> Sequence[int]:
        """Keep the first `length` blocks. Return the removed ones, last block first."""
        own = self.hashes
        removed = own[: length - 1 : -1] if length else own[::-1]
        del own[length:]
        most = self._root_offset + length
        if self._owner_end > most:
            self._owner_end = most
        if self._holder_ends is not None:
            self._holder_ends.update(
                (name, most) for name, end in self._holder_ends.items() if end > most
            )
        return removed

    def merge_overlaps(self, overlaps: dict[str, int], start: int, length: int) -> dict[str, int]:
        """Return `overlaps` with those of other holders added; it may be changed in place. The
        prompt has `start` blocks above this run and matches its first `length` blocks."""
        if start != self._root_offset:
            self._rebase(start)
        top = start + length
        ends = self._holder_ends
        if ends is None:
            overlaps.setdefault(self._owner, min(self._owner_end, top))
            return overlaps
        held = ends.copy()
        if length < len(self.hashes):
            for (
                name,
                end,
            ) in ends.items():  # faster than to build the dict, since few ends are deeper
                if end > top:
                    held[name] = top
        if overlaps:
            held.update(overlaps)
        return held

    def _rebase(self, start: int) -> None:
        """Set the distance to the chain's root, which only a match knows, and shift the ends."""
        more = start - self._root_offset
        self._root_offset = start
        self._owner_end += more
        if self._holder_ends is not None:
            self._holder_ends = {name: end + more for name, end in self._holder_ends.items()}

    def find_position(self, block: int) -> int:
        """Return the index of a block. Raises ValueError."""
        return 0 if self.hashes[0] == block else self.hashes.index(block)

    def find_next_position(self, worker: str, block: int) -> int:
        """Return the index after a block, which is most likely the last that `worker` holds."""
        depth = self.get_depth(worker)
        if depth and self.hashes[depth - 1] == block:
            return depth
        return self.find_position(block) + 1

    def match_tail(self, length: int, hashes: Sequence[int], start: int) -> int:
        """Return how many blocks before index `length`, going upwards, equal `hashes` from
        `start`."""
        own, most = self.hashes, min(length, len(hashes) - start)
        if most > 2 and own[length - most] == hashes[start + most - 1]:
            tail = array("Q", hashes[start : start + most])
            tail.reverse()
            if tail == own[length - most : length]:
                return most
        count = 0
        while count < most and own[length - count - 1] == hashes[start + count]:
            count += 1
        return count


class LruBlockRuns:
    """All runs in the order of last use. `child_counts` is the number of runs directly below each
    parent block."""

    def __init__(self) -> None:
        self._sentinel = BlockRun(-1, 0, "", 0)
        self._sentinel.lru_previous = self._sentinel.lru_next = self._sentinel
        self._cursors = [self._sentinel, self._sentinel]
        self.child_counts: dict[int, int] = {}
        self._free_numbers: list[int] = []
        self.by_number: list[BlockRun] = []
        self.count = 0

    def create(self, parent: int, owner: str, owner_bit: int, hashes: Sequence[int]) -> BlockRun:
        """Return a new run, held whole by `owner`, as the most recently used."""
        if self._free_numbers:
            number = self._free_numbers.pop()
            run = self.by_number[number] = BlockRun(number, parent, owner, owner_bit, hashes)
        else:
            run = BlockRun(len(self.by_number), parent, owner, owner_bit, hashes)
            self.by_number.append(run)
        self.child_counts[parent] = self.child_counts.get(parent, 0) + 1
        self._link(run)
        self.count += 1
        return run

    def delete(self, run: BlockRun) -> None:
        """Delete an empty run and recycle its number."""
        left = self.child_counts[run.parent] - 1
        if left:
            self.child_counts[run.parent] = left
        else:
            del self.child_counts[run.parent]
        self._unlink(run)
        self._free_numbers.append(run.number)
        self.by_number[run.number] = self._sentinel
        self.count -= 1

    def touch(self, run: BlockRun) -> None:
        """Mark the run as the most recently used."""
        if self._sentinel.lru_previous is not run:
            self._unlink(run)
            self._link(run)

    def find_coldest(self, count: int) -> tuple[BlockRun, int] | None:
        """Return the least recently used run with removable blocks, and its length without up to
        `count` of them. Blocks with children below them stay. None: there is no run."""
        for _ in range(self.count):
            run = self._sentinel.lru_next
            length = _length_after_eviction(run.hashes, self.child_counts, count)
            if length < len(run.hashes):
                return run, length
            self.touch(run)
        if not self.count:
            return None
        run = self._sentinel.lru_next
        return run, max(0, len(run.hashes) - count)

    def start_walk(self, walk: int) -> None:
        """Start the walk of SWEEP_CURSOR or COPY_CURSOR at the least recently used run."""
        self._cursors[walk] = self._sentinel.lru_next

    def advance(self, walk: int) -> BlockRun | None:
        """Return the next run of a walk, or None at its end. Runs may change between two calls. A
        run that was touched in between is returned again."""
        run = self._cursors[walk]
        if run is self._sentinel:
            return None
        self._cursors[walk] = run.lru_next
        return run

    def _link(self, run: BlockRun) -> None:
        last = self._sentinel.lru_previous
        run.lru_previous, run.lru_next = last, self._sentinel
        last.lru_next = self._sentinel.lru_previous = run

    def _unlink(self, run: BlockRun) -> None:
        if run in self._cursors:
            self._cursors = [run.lru_next if at is run else at for at in self._cursors]
        run.lru_previous.lru_next, run.lru_next.lru_previous = run.lru_next, run.lru_previous


def _length_after_eviction(hashes: Sequence[int], children: Container[int], count: int) -> int:
    length = len(hashes)
    least = max(0, length - count)
    while length > least and hashes[length - 1] not in children:
        length -= 1
    return length


SHARD_COUNT: Final = 256
"""Number of dicts that share the map. A dict copies itself when it grows; small ones are fast."""

ANCHOR_BYTES: Final = 108
"""Upper bound: 48 bytes for the hash, up to 60 for the map entry just after a shard has grown."""


class Anchors:
    """The map. `shard_getters[block & 255](block)` returns the number of a block's run, or None."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARD_COUNT)]
        self.shard_getters: list[Callable[[int], int | None]] = [
            shard.get for shard in self._shards
        ]
        self.count = 0

    def put(self, block: int, run_number: int) -> None:
        """Map a block to a run, replacing an older entry."""
        shard = self._shards[block & 255]
        before = len(shard)
        shard[block] = run_number
        self.count += len(shard) - before

    def remove(self, blocks: Iterable[int], run_number: int) -> list[int]:
        """Remove the entries of blocks in this run. Return the blocks in other runs."""
        shards = self._shards
        others = []
        for block in blocks:
            shard = shards[block & 255]
            if block in shard:
                if shard[block] == run_number:
                    del shard[block]
                    self.count -= 1
                else:
                    others.append(block)
        return others

    def find_in_other_runs(self, blocks: Iterable[int], run_number: int) -> list[int]:
        """Return the blocks that are mapped to another run."""
        shards = self._shards
        return [
            block
            for block in blocks
            if block in (shard := shards[block & 255]) and shard[block] != run_number
        ]
