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

SWEEP: Final = 0
COPY: Final = 1

_INTS: Final = tuple(range(4_096))
"""Ints that runs share: a copy of a run's ends then finds them in the processor's cache."""


class Run:
    """`name`: its number. `hashes`: the blocks, the first under `parent`. `workers`: the set of
    those that hold some of it. `doubtful`: it may repeat blocks that stand in another run, too.
    `copied`: the last copy that is done with it. `before`, `after`: neighbours in the order of last
    use."""

    __slots__ = (
        "_end",
        "_ends",
        "_owner",
        "_start",
        "after",
        "before",
        "copied",
        "doubtful",
        "hashes",
        "name",
        "parent",
        "workers",
    )

    before: Run
    after: Run

    def __init__(
        self, name: int, parent: int, owner: str, worker: int, hashes: Sequence[int] = ()
    ) -> None:
        """`owner`, as a set `worker`, holds all of it."""
        self.name = name
        self.parent = parent
        self.hashes = array("Q", hashes)
        self.workers = worker
        self.doubtful = False
        self.copied = 0
        self._start = 0
        self._owner = owner
        self._end = len(hashes)
        self._ends: dict[str, int] | None = None

    @property
    def holders(self) -> int:
        """How many workers hold some of it."""
        return 1 if self._ends is None else len(self._ends)

    @property
    def depths(self) -> Mapping[str, int]:
        """Worker -> how many of its blocks it holds."""
        ends, start = self._ends, self._start
        if ends is None:
            return {self._owner: self._end - start}
        return {worker: end - start for worker, end in ends.items()}

    def depth(self, worker: str) -> int:
        """How many of its blocks a worker holds."""
        ends, start = self._ends, self._start
        if ends is None:
            return self._end - start if worker == self._owner else 0
        return ends.get(worker, start) - start

    def hold(self, name: str, worker: int, depth: int) -> int:
        """A worker (`worker`: as a set) holds so many of its blocks (0: none). By how many the
        holders grew."""
        if depth:
            self.workers |= worker
        else:
            self.workers &= ~worker
        end = self._start + depth
        if end < len(_INTS):
            end = _INTS[end]
        ends = self._ends
        if ends is None:
            if name == self._owner:
                self._end = end
                return 0
            self._ends = ends = {self._owner: self._end} if self._end > self._start else {}
            before = 1
        else:
            before = len(ends)
        if depth:
            ends[name] = end
        else:
            ends.pop(name, None)
        return len(ends) - before

    def grow(self, hashes: Sequence[int]) -> None:
        """Its only holder holds these after what there is."""
        self.hashes.extend(hashes)
        end = self._start + len(self.hashes)
        if self._ends is None:
            self._end = end
        else:
            for name in self._ends:
                self._ends[name] = end

    def deepest(self) -> int:
        """How many of its blocks are held by anybody."""
        if self._ends is None:
            return self._end - self._start
        return max(self._ends.values(), default=self._start) - self._start

    def cut(self, length: int) -> Sequence[int]:
        """Nobody is to hold more than `length` blocks; those that go, tails first."""
        own = self.hashes
        gone = own[: length - 1 : -1] if length else own[::-1]
        del own[length:]
        most = self._start + length
        if self._end > most:
            self._end = most
        if self._ends is not None:
            self._ends.update((name, most) for name, end in self._ends.items() if end > most)
        return gone

    def merge(self, found: dict[str, int], start: int, most: int) -> dict[str, int]:
        """`found` (worker -> overlap) and, of workers not in it, what they hold of the first `most`
        blocks, `start` blocks of the prompt being above them."""
        if start != self._start:
            self._begin_at(start)
        top = start + most
        ends = self._ends
        if ends is None:
            found.setdefault(self._owner, min(self._end, top))
            return found
        if most < len(self.hashes):
            here = {name: end if end < top else top for name, end in ends.items()}  # noqa: FURB136
        else:
            here = ends.copy()
        if found:
            here.update(found)
        return here

    def _begin_at(self, start: int) -> None:
        """Ends are counted from the root, for matches to copy; where that is, a match tells."""
        more = start - self._start
        self._start = start
        self._end += more
        if self._ends is not None:
            self._ends = {name: end + more for name, end in self._ends.items()}

    def place(self, block: int) -> int:
        """Where a block of it stands. Raises ValueError."""
        return 0 if self.hashes[0] == block else self.hashes.index(block)

    def follows(self, worker: str, block: int) -> int:
        """The place right after a block of it, most likely the last that `worker` holds."""
        depth = self.depth(worker)
        if depth and self.hashes[depth - 1] == block:
            return depth
        return self.place(block) + 1

    def common(self, place: int, hashes: Sequence[int], start: int) -> int:
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

    def tail(self, length: int, hashes: Sequence[int], start: int) -> int:
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


class Runs:
    """All runs in the order of last use. `children`: block -> how many runs hang under it.
    `named`: by number."""

    def __init__(self) -> None:
        self._end = Run(-1, 0, "", 0)
        self._end.before = self._end.after = self._end
        self._cursors = [self._end, self._end]
        self.children: dict[int, int] = {}
        self._unused: list[int] = []
        self.named: list[Run] = []
        self.count = 0

    def begin(self, parent: int, owner: str, worker: int, hashes: Sequence[int]) -> Run:
        """A new run, the warmest. `worker`: `owner` as a set."""
        if self._unused:
            name = self._unused.pop()
            run = self.named[name] = Run(name, parent, owner, worker, hashes)
        else:
            run = Run(len(self.named), parent, owner, worker, hashes)
            self.named.append(run)
        self.children[parent] = self.children.get(parent, 0) + 1
        self._link(run)
        self.count += 1
        return run

    def end(self, run: Run) -> None:
        """It is empty."""
        left = self.children[run.parent] - 1
        if left:
            self.children[run.parent] = left
        else:
            del self.children[run.parent]
        self._unlink(run)
        self._unused.append(run.name)
        self.named[run.name] = self._end
        self.count -= 1

    def touch(self, run: Run) -> None:
        """It was used."""
        if self._end.before is not run:
            self._unlink(run)
            self._link(run)

    def coldest(self, count: int) -> tuple[Run, int] | None:
        """The coldest run that has blocks with nothing below them, and to what length it may be
        cut: by at most `count`. None: there is no run."""
        for _ in range(self.count):
            run = self._end.after
            length = _without_children(run.hashes, self.children, count)
            if length < len(run.hashes):
                return run, length
            self.touch(run)
        if not self.count:
            return None
        run = self._end.after
        return run, max(0, len(run.hashes) - count)

    def begin_round(self, walk: int) -> None:
        """`next` begins with the coldest. `walk`: SWEEP or COPY, each goes its own way."""
        self._cursors[walk] = self._end.after

    def next(self, walk: int) -> Run | None:
        """Every run, one a call, in spite of changes between the calls; one that was used meanwhile
        comes again. None: that was all."""
        run = self._cursors[walk]
        if run is self._end:
            return None
        self._cursors[walk] = run.after
        return run

    def __iter__(self) -> Iterator[Run]:
        run = self._end.after
        while run is not self._end:
            yield run
            run = run.after

    def _link(self, run: Run) -> None:
        last = self._end.before
        run.before, run.after = last, self._end
        last.after = self._end.before = run

    def _unlink(self, run: Run) -> None:
        if run in self._cursors:
            self._cursors = [run.after if one is run else one for one in self._cursors]
        run.before.after, run.after.before = run.after, run.before


def _without_children(hashes: Sequence[int], children: Container[int], count: int) -> int:
    length = len(hashes)
    least = max(0, length - count)
    while length > least and hashes[length - 1] not in children:
        length -= 1
    return length
