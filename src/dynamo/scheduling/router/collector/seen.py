"""Which prefixes have been asked for before, by anybody: what unlimited memory would hold."""

from __future__ import annotations

from collections.abc import Sequence

PREFIX_STRIDE = 4
"""Every fourth block stands for those before it: a quarter of the memory, of the time, and of the
resolution."""
PREFIXES_PER_GENERATION = 19_000
"""In a generation; a few more and CPython's set takes four times the room."""


class PrefixHistory:
    """Hashes are chained, so that a block that was seen has all blocks before it seen: the longest
    known prefix is found by halving. Three generations of `kept` names each; the oldest is
    forgotten as a whole."""

    def __init__(
        self, generation_size: int = PREFIXES_PER_GENERATION, stride: int = PREFIX_STRIDE
    ) -> None:
        self._generation_size = generation_size
        self._stride = stride
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._oldest: set[int] = set()

    def add(self, hashes: Sequence[int]) -> int:
        """Remember a prompt's blocks; how many of them, from the first on, were known before
        (rounded down to the stride)."""
        marks = hashes[self._stride - 1 :: self._stride]
        new, old, oldest = self._new, self._old, self._oldest
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            mark = marks[middle]
            if mark in new or mark in old or mark in oldest:
                low = middle + 1
            else:
                high = middle
        new.update(marks)
        if len(new) > self._generation_size:
            self._new, self._old, self._oldest = set(), new, old
        return low * self._stride
