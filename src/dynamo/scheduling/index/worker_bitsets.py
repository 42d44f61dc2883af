"""Sets of workers as ints with one bit for each worker, and the holes in what workers hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final


class WorkerBitsets:
    """The assignment of bits to workers.

    The bit of a removed worker may remain in sets until `recycle_bits` makes it available again.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._unused: list[int] = []

    @property
    def names(self) -> Sequence[str]:
        """The workers that have a bit."""
        return tuple(self._bits)

    def get_or_assign_bit(self, worker: str) -> int:
        """Return the set of this worker alone. Its bit is assigned on first use."""
        bit = self._bits.get(worker)
        if bit is None:
            if self._unused:
                number = self._unused.pop()
                self._names[number] = worker
            else:
                number = len(self._names)
                self._names.append(worker)
            self._bits[worker] = bit = 1 << number
        return bit

    def get_bit(self, worker: str) -> int:
        """Return the set of this worker alone, or the empty set without a bit."""
        return self._bits.get(worker, 0)

    def remove(self, worker: str) -> int:
        """Remove the worker and return its former set."""
        return self._bits.pop(worker, 0)

    def recycle_bits(self, dropped: int) -> None:
        """Make the bits of removed workers available again. No set may contain them."""
        while dropped:
            low = dropped & -dropped
            self._unused.append(low.bit_length() - 1)
            dropped ^= low

    def list_members(self, workers: int) -> Sequence[str]:
        """Return the names in a set, including removed workers with unrecycled bits."""
        names = []
        while workers:
            low = workers & -workers
            names.append(self._names[low.bit_length() - 1])
            workers ^= low
        return names


MAX_HOLES: Final = 8_192
HOLE_BYTES: Final = 160
HOLE_BUDGET_DIVISOR: Final = 16
"""Holes take at most this fraction (1/n) of the budget of the index."""


class Holes:
    """The holes of all workers. `workers_by_block` maps a block to the bitset of workers that lack
    it but hold blocks below it, as far as the index knows. The oldest holes are dropped first."""

    def __init__(self, budget_bytes: int) -> None:
        self._max_holes = min(MAX_HOLES, budget_bytes // HOLE_BUDGET_DIVISOR // HOLE_BYTES)
        self.workers_by_block: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.workers_by_block)

    def add(self, worker: int, blocks: Iterable[int]) -> None:
        """Add holes of `worker` (a bitset)."""
        holes = self.workers_by_block
        for block in blocks:
            holes[block] = holes.pop(block, 0) | worker
        while len(holes) > self._max_holes:
            del holes[next(iter(holes))]

    def fill(self, worker: int, blocks: Sequence[int]) -> bool:
        """Remove holes of `worker` that it now holds. Return whether there were any."""
        holes = self.workers_by_block
        if holes.keys().isdisjoint(blocks):
            return False
        filled = [block for block in blocks if holes.get(block, 0) & worker]
        for block in filled:
            holes[block] ^= worker
            if not holes[block]:
                del holes[block]
        return bool(filled)

    def trim_end(self, worker: int, blocks: Sequence[int], length: int) -> int:
        """Return `length` reduced by the holes of `worker` at the end of `blocks[:length]`."""
        holes = self.workers_by_block
        while length and holes.get(blocks[length - 1], 0) & worker:
            length -= 1
        return length

    def iter_holes(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (index in `blocks`, bitset of workers without this block)."""
        holes = self.workers_by_block
        if holes.keys().isdisjoint(blocks):
            return
        for position, block in enumerate(blocks):
            if workers := holes.get(block):
                yield position, workers

    def remove_workers(self, workers: int) -> None:
        """Remove all holes of these workers (a bitset)."""
        remaining = {block: held & ~workers for block, held in self.workers_by_block.items()}
        self.workers_by_block = {block: held for block, held in remaining.items() if held}
