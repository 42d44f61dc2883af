"""Sets of workers as ints, one bit a worker."""

from __future__ import annotations

from collections.abc import Sequence


class WorkerBitsets:
    """Gives workers bits and names the members of sets.

    A bit is used again only after `forget`: until then sets may still hold it.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._unused: list[int] = []

    @property
    def names(self) -> Sequence[str]:
        """Every worker that has a bit."""
        return tuple(self._bits)

    def get_or_assign_bit(self, worker: str) -> int:
        """The set of this worker alone; its bit is assigned on first use."""
        found = self._bits.get(worker)
        if found is None:
            if self._unused:
                number = self._unused.pop()
                self._names[number] = worker
            else:
                number = len(self._names)
                self._names.append(worker)
            self._bits[worker] = found = 1 << number
        return found

    def get_bit(self, worker: str) -> int:
        """The set of this worker alone; the empty one where it has no bit."""
        return self._bits.get(worker, 0)

    def remove(self, worker: str) -> int:
        """The worker is no member any more; what it was as a set."""
        return self._bits.pop(worker, 0)

    def recycle_bits(self, dropped: int) -> None:
        """No set holds these dropped workers any more."""
        while dropped:
            low = dropped & -dropped
            self._unused.append(low.bit_length() - 1)
            dropped ^= low

    def list_members(self, workers: int) -> Sequence[str]:
        """The names in a set, dropped ones that are not forgotten included."""
        found = []
        while workers:
            low = workers & -workers
            found.append(self._names[low.bit_length() - 1])
            workers ^= low
        return found
