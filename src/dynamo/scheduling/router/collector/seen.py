"""Which prefixes have been asked for before, by anybody: what unlimited memory would hold."""

from __future__ import annotations

from collections.abc import Sequence

STRIDE = 4
"""Every fourth block stands for those before it: a quarter of the memory, of the time, and of the
resolution."""
KEPT = 1 << 15


class SeenPrefixes:
    """Hashes are chained, so that a block that was seen has all blocks before it seen: the longest
    known prefix is found by halving. Two generations of `kept` names each; the older one is
    forgotten as a whole."""

    def __init__(self, kept: int = KEPT, stride: int = STRIDE) -> None:
        self._kept = kept
        self._stride = stride
        self._new: set[int] = set()
        self._old: set[int] = set()

    def add(self, hashes: Sequence[int]) -> int:
        """Remember a prompt's blocks; how many of them, from the first on, were known before
        (rounded down to the stride)."""
        marks = hashes[self._stride - 1 :: self._stride]
        new, old = self._new, self._old
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            if marks[middle] in new or marks[middle] in old:
                low = middle + 1
            else:
                high = middle
        new.update(marks)
        if len(new) > self._kept:
            self._old, self._new = new, set()
        return low * self._stride
