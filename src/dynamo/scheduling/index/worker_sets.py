"""Sets of workers as ints, one bit a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_REMEMBERED: Final = 16_384


class WorkerSets:
    """Numbers workers and names the members of sets.

    A number is used again only after `forget`: until then sets may still hold it.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._unused: list[int] = []
        self._members: dict[int, tuple[str, ...]] = {}
        self.live = 0

    @property
    def names(self) -> Sequence[str]:
        """Every worker that has a number."""
        return tuple(self._numbers)

    def number(self, worker: str) -> int:
        """The bit of a worker, assigned on first use."""
        found = self._numbers.get(worker)
        if found is None:
            if self._unused:
                found = self._unused.pop()
                self._names[found] = worker
            else:
                found = len(self._names)
                self._names.append(worker)
            self._numbers[worker] = found
            self.live |= 1 << found
        return found

    def known_number(self, worker: str) -> int | None:
        """The bit of a worker that has one."""
        return self._numbers.get(worker)

    def drop(self, worker: str) -> int:
        """The worker is no member any more; what it was as a set (0: it was none)."""
        found = self._numbers.pop(worker, None)
        if found is None:
            return 0
        self.live ^= 1 << found
        return 1 << found

    def forget(self, dropped: int) -> None:
        """No set holds these dropped workers any more."""
        while dropped:
            low = dropped & -dropped
            self._unused.append(low.bit_length() - 1)
            dropped ^= low
        self._members.clear()

    def members(self, workers: int) -> tuple[str, ...]:
        """The names in a set."""
        found = self._members.get(workers)
        if found is not None:
            return found
        if len(self._members) >= MAX_REMEMBERED:
            self._members.clear()
        names, rest = [], workers
        while rest:
            low = rest & -rest
            names.append(self._names[low.bit_length() - 1])
            rest ^= low
        self._members[workers] = made = tuple(names)
        return made
