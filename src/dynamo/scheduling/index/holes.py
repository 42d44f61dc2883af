"""Blocks that workers gave up out of turn: before those that hang under them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

MAX_HOLES: Final = 8_192
HOLE_BYTES: Final = 160
HOLE_BUDGET_DIVISOR: Final = 16
"""At most so small a part of the index's budget is for holes."""


class Holes:
    """`workers`: block -> set of those that do not hold it, although what they hold goes on behind
    it as far as the index knows. The oldest are forgotten."""

    def __init__(self, budget_bytes: int) -> None:
        self._max_holes = min(MAX_HOLES, budget_bytes // HOLE_BUDGET_DIVISOR // HOLE_BYTES)
        self.workers_by_block: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.workers_by_block)

    def add(self, worker: int, blocks: Iterable[int]) -> None:
        """`worker`, as a set, holds none of these any more."""
        found = self.workers_by_block
        for block in blocks:
            found[block] = found.pop(block, 0) | worker
        while len(found) > self._max_holes:
            del found[next(iter(found))]

    def fill(self, worker: int, blocks: Sequence[int]) -> bool:
        """`worker` holds these; whether one was a hole of it."""
        found = self.workers_by_block
        if found.keys().isdisjoint(blocks):
            return False
        filled = [block for block in blocks if found.get(block, 0) & worker]
        for block in filled:
            found[block] ^= worker
            if not found[block]:
                del found[block]
        return bool(filled)

    def trim_end(self, worker: int, blocks: Sequence[int], length: int) -> int:
        """What is left of the first `length` blocks without the holes of `worker` at the end."""
        found = self.workers_by_block
        while length and found.get(blocks[length - 1], 0) & worker:
            length -= 1
        return length

    def iter_holes(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(place in `blocks`, workers without it)."""
        found = self.workers_by_block
        if found.keys().isdisjoint(blocks):
            return
        for place, block in enumerate(blocks):
            if workers := found.get(block):
                yield place, workers

    def remove_workers(self, workers: int) -> None:
        """These are no more."""
        left = {block: held & ~workers for block, held in self.workers_by_block.items()}
        self.workers_by_block = {block: held for block, held in left.items() if held}
