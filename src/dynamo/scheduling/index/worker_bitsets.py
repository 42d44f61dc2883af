"""Sets of workers as ints with one bit for each worker."""

from __future__ import annotations

from collections.abc import Sequence


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
