"""Chains of blocks as runs, and the order in which they are forgotten: cold ones, tails first.

A run is a piece of a chain, 8 bytes a block. Further runs may hang under any of its blocks.
A worker holds a run up to some depth, because whoever holds a block holds those above it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final

RUN_BYTES: Final = 400
RUN_BLOCK_BYTES: Final = 9
HOLDER_BYTES: Final = 320
"""Upper bounds: of a run, of a block in it, of a worker beyond the first that holds it."""

Level = tuple[int, int, tuple[str, ...]]
"""(depth, set, names): the workers that hold exactly so many blocks of a run."""

Members = Callable[[int], tuple[str, ...]]
"""The names of a set."""


class Run:
    """`name`: its number. `hashes`: the blocks, the first under `parent`. `before`, `after`:
    neighbours in the order of last use."""

    __slots__ = (
        "_depth",
        "_depths",
        "_levels",
        "_owner",
        "after",
        "before",
        "hashes",
        "name",
        "parent",
    )

    before: Run
    after: Run

    def __init__(self, name: int, parent: int, owner: int) -> None:
        self.name = name
        self.parent = parent
        self.hashes = array("Q")
        self._owner = owner
        self._depth = 0
        self._depths: dict[int, int] | None = None
        self._levels: tuple[Level, ...] | None = None

    @property
    def holders(self) -> int:
        """How many workers hold some of it."""
        return 1 if self._depths is None else len(self._depths)

    def depth(self, worker: int) -> int:
        """How many of its blocks a worker holds."""
        if self._depths is None:
            return self._depth if worker == self._owner else 0
        return self._depths.get(worker, 0)

    def hold(self, worker: int, depth: int) -> None:
        """A worker holds so many of its blocks (0: none)."""
        self._levels = None
        if self._depths is None:
            if worker == self._owner:
                self._depth = depth
                return
            self._depths = {self._owner: self._depth} if self._depth else {}
        if depth:
            self._depths[worker] = depth
        else:
            self._depths.pop(worker, None)

    def deepest(self) -> int:
        """How many of its blocks are held by anybody."""
        if self._depths is None:
            return self._depth
        return max(self._depths.values(), default=0)

    def cut(self, length: int) -> Sequence[int]:
        """Nobody is to hold more than `length` blocks; those that go, tails first."""
        gone = self.hashes[length:]
        del self.hashes[length:]
        self._levels = None
        self._depth = min(self._depth, length)
        for worker, depth in list((self._depths or {}).items()):
            if depth > length:
                self.hold(worker, length)
        gone.reverse()
        return gone

    def forget(self, dropped: int) -> None:
        """Workers of this set hold nothing."""
        for worker in [one for one in self.workers() if dropped >> one & 1]:
            self.hold(worker, 0)

    def workers(self) -> Iterator[int]:
        """The numbers of those that hold some of it."""
        return iter((self._owner,) if self._depths is None else tuple(self._depths))

    def levels(self, members: Members) -> Sequence[Level]:
        """Who holds how much, the deepest first."""
        if self._levels is None:
            sets: dict[int, int] = {}
            depths = {self._owner: self._depth} if self._depths is None else self._depths
            for worker, depth in depths.items():
                sets[depth] = sets.get(depth, 0) | 1 << worker
            self._levels = tuple(
                (depth, sets[depth], members(sets[depth])) for depth in sorted(sets, reverse=True)
            )
        return self._levels

    def place(self, block: int) -> int:
        """Where a block of it stands."""
        return 0 if self.hashes[0] == block else self.hashes.index(block)

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


class Runs:
    """All runs in the order of last use, and which blocks have runs below them. `named`: by
    number."""

    def __init__(self) -> None:
        self._end = Run(-1, 0, -1)
        self._end.before = self._end.after = self._end
        self._children: dict[int, int] = {}
        self._cursor = self._end
        self._unused: list[int] = []
        self.named: list[Run] = []
        self.count = 0

    def begin(self, parent: int, owner: int) -> Run:
        """A new run, the warmest."""
        run = Run(self._unused.pop() if self._unused else len(self.named), parent, owner)
        if run.name == len(self.named):
            self.named.append(run)
        else:
            self.named[run.name] = run
        self._children[parent] = self._children.get(parent, 0) + 1
        self._link(run)
        self.count += 1
        return run

    def end(self, run: Run) -> None:
        """It is empty."""
        left = self._children[run.parent] - 1
        if left:
            self._children[run.parent] = left
        else:
            del self._children[run.parent]
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
            length = _without_children(run.hashes, self._children, count)
            if length < len(run.hashes):
                return run, length
            self.touch(run)
        if not self.count:
            return None
        run = self._end.after
        return run, max(0, len(run.hashes) - count)

    def begin_round(self) -> None:
        """`next` begins with the coldest."""
        self._cursor = self._end.after

    def next(self) -> Run | None:
        """Every run once, one a call, in spite of changes between the calls. None: that was all."""
        run = self._cursor
        if run is self._end:
            return None
        self._cursor = run.after
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
        if self._cursor is run:
            self._cursor = run.after
        run.before.after, run.after.before = run.after, run.before


def _without_children(hashes: Sequence[int], children: Container[int], count: int) -> int:
    length = len(hashes)
    least = max(0, length - count)
    while length > least and hashes[length - 1] not in children:
        length -= 1
    return length
