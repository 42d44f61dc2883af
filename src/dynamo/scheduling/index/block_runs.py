"""Chains of blocks as runs, and the order in which they are forgotten: cold ones, tails first.

A run is a piece of a chain, 8 bytes a block. Further runs may hang under any of its blocks.
A worker holds a run up to some depth, because whoever holds a block holds those above it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

RUN_BYTES: Final = 440
RUN_BLOCK_BYTES: Final = 9
HOLDER_BYTES: Final = 320
"""Upper bounds: of a run, of a block in it, of a worker beyond the first that holds it."""

SWEEP_CURSOR: Final = 0
COPY_CURSOR: Final = 1

_SHARED_INTS: Final = tuple(range(4_096))
"""Ints that runs share: a copy of a run's ends then finds them in the processor's cache."""


class BlockRun:
    """`name`: its number. `hashes`: the blocks, the first under `parent`. `workers`: the set of
    those that hold some of it. `doubtful`: it may repeat blocks that stand in another run, too.
    `copied`: the last copy that is done with it. `before`, `after`: neighbours in the order of last
    use."""

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
        self, name: int, parent: int, owner: str, worker: int, hashes: Sequence[int] = ()
    ) -> None:
        """`owner`, as a set `worker`, holds all of it."""
        self.number = name
        self.parent = parent
        self.hashes = array("Q", hashes)
        self.holder_bits = worker
        self.may_repeat_blocks = False
        self.last_copy = 0
        self._root_offset = 0
        self._owner = owner
        self._owner_end = len(hashes)
        self._holder_ends: dict[str, int] | None = None

    @property
    def holder_count(self) -> int:
        """How many workers hold some of it."""
        return 1 if self._holder_ends is None else len(self._holder_ends)

    @property
    def depths(self) -> Mapping[str, int]:
        """Worker -> how many of its blocks it holds."""
        ends, start = self._holder_ends, self._root_offset
        if ends is None:
            return {self._owner: self._owner_end - start}
        return {worker: end - start for worker, end in ends.items()}

    def get_depth(self, worker: str) -> int:
        """How many of its blocks a worker holds."""
        ends, start = self._holder_ends, self._root_offset
        if ends is None:
            return self._owner_end - start if worker == self._owner else 0
        return ends.get(worker, start) - start

    def set_depth(self, name: str, worker: int, depth: int) -> int:
        """A worker (`worker`: as a set) holds so many of its blocks (0: none). By how many the
        holders grew."""
        if depth:
            self.holder_bits |= worker
        else:
            self.holder_bits &= ~worker
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
        """Its only holder holds these after what there is."""
        self.hashes.extend(hashes)
        end = self._root_offset + len(self.hashes)
        if self._holder_ends is None:
            self._owner_end = end
        else:
            for name in self._holder_ends:
                self._holder_ends[name] = end

    def find_max_depth(self) -> int:
        """How many of its blocks are held by anybody."""
        if self._holder_ends is None:
            return self._owner_end - self._root_offset
        return max(self._holder_ends.values(), default=self._root_offset) - self._root_offset

    def truncate(self, length: int) -> Sequence[int]:
        """Nobody is to hold more than `length` blocks; those that go, tails first."""
        own = self.hashes
        gone = own[: length - 1 : -1] if length else own[::-1]
        del own[length:]
        most = self._root_offset + length
        if self._owner_end > most:
            self._owner_end = most
        if self._holder_ends is not None:
            self._holder_ends.update(
                (name, most) for name, end in self._holder_ends.items() if end > most
            )
        return gone

    def merge_overlaps(self, found: dict[str, int], start: int, most: int) -> dict[str, int]:
        """`found` (worker -> overlap) and, of workers not in it, what they hold of the first `most`
        blocks, `start` blocks of the prompt being above them."""
        if start != self._root_offset:
            self._rebase(start)
        top = start + most
        ends = self._holder_ends
        if ends is None:
            found.setdefault(self._owner, min(self._owner_end, top))
            return found
        if most < len(self.hashes):
            here = {name: end if end < top else top for name, end in ends.items()}  # noqa: FURB136
        else:
            here = ends.copy()
        if found:
            here.update(found)
        return here

    def _rebase(self, start: int) -> None:
        """Ends are counted from the root, for matches to copy; where that is, a match tells."""
        more = start - self._root_offset
        self._root_offset = start
        self._owner_end += more
        if self._holder_ends is not None:
            self._holder_ends = {name: end + more for name, end in self._holder_ends.items()}

    def find_position(self, block: int) -> int:
        """Where a block of it stands. Raises ValueError."""
        return 0 if self.hashes[0] == block else self.hashes.index(block)

    def find_next_position(self, worker: str, block: int) -> int:
        """The place right after a block of it, most likely the last that `worker` holds."""
        depth = self.get_depth(worker)
        if depth and self.hashes[depth - 1] == block:
            return depth
        return self.find_position(block) + 1

    def match_length(self, place: int, hashes: Sequence[int], start: int) -> int:
        """How many blocks from `place` on are those of `hashes` from `start` on; the first is. The
        chain makes halving enough: where two are equal, so are all before."""
        own = self.hashes
        high = min(len(own) - place, len(hashes) - start)
        if own[place + high - 1] == hashes[start + high - 1]:
            return high
        low = 1
        while high - low > 1:
            middle = (low + high) >> 1
            if own[place + middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def match_tail(self, length: int, hashes: Sequence[int], start: int) -> int:
        """How many of the last of its first `length` blocks are those of `hashes` from `start` on,
        tails first."""
        own, most = self.hashes, min(length, len(hashes) - start)
        if most > 2 and own[length - most] == hashes[start + most - 1]:
            given = array("Q", hashes[start : start + most])
            given.reverse()
            if given == own[length - most : length]:
                return most
        count = 0
        while count < most and own[length - count - 1] == hashes[start + count]:
            count += 1
        return count


class LruBlockRuns:
    """All runs in the order of last use. `children`: block -> how many runs hang under it.
    `named`: by number."""

    def __init__(self) -> None:
        self._sentinel = BlockRun(-1, 0, "", 0)
        self._sentinel.lru_previous = self._sentinel.lru_next = self._sentinel
        self._cursors = [self._sentinel, self._sentinel]
        self.child_counts: dict[int, int] = {}
        self._free_numbers: list[int] = []
        self.by_number: list[BlockRun] = []
        self.count = 0

    def create(self, parent: int, owner: str, worker: int, hashes: Sequence[int]) -> BlockRun:
        """A new run, the warmest. `worker`: `owner` as a set."""
        if self._free_numbers:
            name = self._free_numbers.pop()
            run = self.by_number[name] = BlockRun(name, parent, owner, worker, hashes)
        else:
            run = BlockRun(len(self.by_number), parent, owner, worker, hashes)
            self.by_number.append(run)
        self.child_counts[parent] = self.child_counts.get(parent, 0) + 1
        self._link(run)
        self.count += 1
        return run

    def delete(self, run: BlockRun) -> None:
        """It is empty."""
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
        """It was used."""
        if self._sentinel.lru_previous is not run:
            self._unlink(run)
            self._link(run)

    def find_coldest(self, count: int) -> tuple[BlockRun, int] | None:
        """The coldest run that has blocks with nothing below them, and to what length it may be
        cut: by at most `count`. None: there is no run."""
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
        """`next` begins with the coldest. `walk`: SWEEP or COPY, each goes its own way."""
        self._cursors[walk] = self._sentinel.lru_next

    def advance(self, walk: int) -> BlockRun | None:
        """Every run, one a call, in spite of changes between the calls; one that was used meanwhile
        comes again. None: that was all."""
        run = self._cursors[walk]
        if run is self._sentinel:
            return None
        self._cursors[walk] = run.lru_next
        return run

    def __iter__(self) -> Iterator[BlockRun]:
        run = self._sentinel.lru_next
        while run is not self._sentinel:
            yield run
            run = run.lru_next

    def _link(self, run: BlockRun) -> None:
        last = self._sentinel.lru_previous
        run.lru_previous, run.lru_next = last, self._sentinel
        last.lru_next = self._sentinel.lru_previous = run

    def _unlink(self, run: BlockRun) -> None:
        if run in self._cursors:
            self._cursors = [run.lru_next if one is run else one for one in self._cursors]
        run.lru_previous.lru_next, run.lru_next.lru_previous = run.lru_next, run.lru_previous


def _length_after_eviction(hashes: Sequence[int], children: Container[int], count: int) -> int:
    length = len(hashes)
    least = max(0, length - count)
    while length > least and hashes[length - 1] not in children:
        length -= 1
    return length
