"""In which order an index forgets: chains as runs of blocks, the coldest run first, tails first.

A compressed prefix tree: a run is a chain of blocks, known by its last one. It costs 8 bytes
a block, and a match pays one look-up for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final

RUN_BYTES: Final = 320
RUN_BLOCK_BYTES: Final = 9
STALE_SHARE: Final = 4
STALE_MIN: Final = 1024
STEP_RUNS: Final = 8

Held = Callable[[int], bool]
"""Whether anybody holds a block."""


class Branches:
    """A run is `array('Q')` of parent, first block, ..., last block."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, array[int]] = OrderedDict()
        self._children: dict[int, int] = {}
        self._blocks = 0
        self._stale = 0
        self._unchecked: list[int] = []

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def bytes_used(self) -> int:
        """An upper bound."""
        return RUN_BYTES * len(self._runs) + RUN_BLOCK_BYTES * self._blocks

    def grow(self, parent: int, hashes: Sequence[int]) -> None:
        """New blocks in a chain under `parent`; the branch is warm."""
        run = self._runs.pop(parent, None)
        if run is None:
            run = self._begin(parent)
        run.extend(hashes)
        self._blocks += len(hashes)
        self._keep(run)

    def touch(self, tail: int) -> None:
        """A match ended with this block."""
        if tail in self._runs:
            self._runs.move_to_end(tail)

    def gone(self, hashes: Sequence[int]) -> None:
        """Nobody holds these blocks any more; tails come first where the caller knows them."""
        run: array[int] | None = None
        for block in hashes:
            if run is None or run[-1] != block:
                if run is not None:
                    self._keep(run)
                run = self._runs.pop(block, None)
            if run is None:
                self._stale += 1
                continue
            run.pop()
            self._blocks -= 1
            if len(run) == 1:
                self._end(run)
                run = None
        if run is not None:
            self._keep(run)

    def coldest(self, count: int) -> list[int]:
        """Takes out up to `count` blocks of the coldest branch, tails first. Empty: there is
        none."""
        for _ in range(len(self._runs)):
            given = self._cut(count, self._children)
            if given:
                return given
        return self._cut(count, ()) if self._runs else []

    def tidy(self, held: Held) -> None:
        """A small step towards runs without blocks that nobody holds."""
        if not self._unchecked:
            if self._stale * STALE_SHARE <= self._blocks + STALE_MIN:
                return
            self._stale = 0
            self._unchecked = list(self._runs)
        for _ in range(min(STEP_RUNS, len(self._unchecked))):
            tail = self._unchecked.pop()
            run = self._runs.get(tail)
            if run is not None and not all(map(held, run[1:])):
                del self._runs[tail]
                self._refill(run, held)

    def chains(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Every run as (parent, blocks), the coldest first."""
        for run in self._runs.values():
            yield run[0], run[1:]

    def _cut(self, count: int, kept: Container[int]) -> list[int]:
        """Blocks from the tail of the coldest run, up to one of `kept`."""
        given: list[int] = []
        _, run = self._runs.popitem(last=False)
        while len(run) > 1 and len(given) < count and run[-1] not in kept:
            given.append(run.pop())
        self._blocks -= len(given)
        if len(run) == 1:
            self._end(run)
            return given
        self._keep(run)
        if len(given) == count:
            self._runs.move_to_end(run[-1], last=False)
        return given

    def _refill(self, run: array[int], held: Held) -> None:
        kept = [block for block in run[1:] if held(block)]
        self._blocks -= len(run) - 1 - len(kept)
        if kept:
            self._keep(array("Q", (run[0], *kept)))
        else:
            self._end(run)

    def _begin(self, parent: int) -> array[int]:
        self._children[parent] = self._children.get(parent, 0) + 1
        return array("Q", (parent,))

    def _keep(self, run: array[int]) -> None:
        """Under its last block. A block that was forgotten and came back may end two runs: the
        longer one stays."""
        other = self._runs.pop(run[-1], None)
        if other is not None:
            if len(other) > len(run):
                run, other = other, run
            self._blocks -= len(other) - 1
            self._end(other)
        self._runs[run[-1]] = run

    def _end(self, run: array[int]) -> None:
        left = self._children[run[0]] - 1
        if left:
            self._children[run[0]] = left
        else:
            del self._children[run[0]]
