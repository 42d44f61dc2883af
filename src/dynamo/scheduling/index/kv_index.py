"""The KV index: a flat map from block hash to the set of workers that hold the block.

A chained hash names a whole prefix, and whoever holds a block holds the blocks above it, so no tree
is needed: along a prompt the sets only shrink, and where they do is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

SHARDS: Final = 256
"""Parts of the map. A dict that grows copies itself at once: in parts, that is short."""

DEFAULT_BUDGET_BYTES: Final = 256 << 20
MAX_INTERNED: Final = 16_384

Segment = tuple[int, int]
"""(blocks, set): after so many blocks the set of workers that hold the prefix ends to be this."""


class KvIndex:
    """Exact as far as it is told. Not thread-safe; no clock, no I/O.

    A set is a Python int, one bit a worker, and equal sets are one object: that is what makes
    a block cheap to keep and a match cheap to find.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._gets: list[Callable[[int], int | None]] = [shard.get for shard in self._shards]
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._unused: list[int] = []
        self._sets: dict[int, int] = {}
        self._members: dict[int, tuple[str, ...]] = {}
        self._live = 0
        self._swept = SHARDS
        self._dropped: list[int] = []
        self.blocks = 0

    @property
    def workers(self) -> Sequence[str]:
        """Every worker that has a number."""
        return tuple(self._numbers)

    def number(self, worker: str) -> int:
        """The bit of a worker ("instance" or "instance/rank"), assigned on first use."""
        found = self._numbers.get(worker)
        if found is None:
            if self._unused:
                found = self._unused.pop()
                self._names[found] = worker
            else:
                found = len(self._names)
                self._names.append(worker)
            self._numbers[worker] = found
            self._live |= 1 << found
        return found

    def store(self, worker: str, parent: int, hashes: Sequence[int]) -> None:
        """`worker` holds this chain; its first block hangs under `parent` (0: the root)."""
        del parent
        bit = self._set(1 << self.number(worker))
        shards = self._shards
        before, after, added = None, bit, 0
        for block in hashes:
            shard = shards[block & 255]
            held = shard.get(block)
            if held is not before:
                before, after = held, bit if held is None else self._set(held | bit)
            if held is None:
                added += 1
            shard[block] = after
        self.blocks += added
        self._sweep()

    def remove(self, worker: str, hashes: Sequence[int]) -> None:
        """`worker` does not hold these blocks any more."""
        found = self._numbers.get(worker)
        if found is None:
            return
        bit = 1 << found
        shards = self._shards
        for block in hashes:
            shard = shards[block & 255]
            held = shard.get(block)
            if held is None or not held & bit:
                continue
            if held == bit:
                del shard[block]
                self.blocks -= 1
            else:
                shard[block] = self._set(held ^ bit)
        self._sweep()

    def clear(self, worker: str) -> None:
        """`worker` holds nothing."""
        self.drop(worker)

    def drop(self, worker: str) -> None:
        """`worker` is no more; its number is used again once every block has forgotten it."""
        found = self._numbers.pop(worker, None)
        if found is None:
            return
        self._live &= ~(1 << found)
        self._members.clear()
        self._dropped.append(found)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """worker -> blocks of the longest prefix of `hashes` that it holds (> 0 only)."""
        if not hashes:
            return {}
        found: dict[str, int] = {}
        rest = self._live
        for depth, held in reversed(self._segments(hashes)):
            new = held & rest
            if new:
                rest ^= new
                members = self._members.get(new) or self._name(new)
                found.update(dict.fromkeys(members, depth))
        return found

    def _segments(self, hashes: Sequence[int]) -> list[Segment]:
        """The sets along a prompt, shallow ones first, each with the last depth where it holds."""
        gets = self._gets
        first = hashes[0]
        held = gets[first & 255](first)
        if held is None:
            return []
        last, low, low_held, high = len(hashes) - 1, 0, held, 1
        ahead: list[tuple[int, int | None]] = []
        while low < last:
            high = min(high, last)
            block = hashes[high]
            seen = gets[block & 255](block)
            if seen is None:
                ahead.append((high, None))
                break
            low, low_held, high = high, seen, 2 * high + 1
        ahead.append((low, low_held))
        return self._between(hashes, held, ahead)

    def _between(
        self, hashes: Sequence[int], held: int, ahead: list[tuple[int, int | None]]
    ) -> list[Segment]:
        gets = self._gets
        found: list[Segment] = []
        at = 0
        while ahead:
            there, seen = ahead[-1]
            if seen is held:
                at = there
                ahead.pop()
            elif there - at <= 1:
                found.append((at + 1, held))
                if seen is None:
                    return found
                at, held = there, seen
                ahead.pop()
            else:
                middle = (at + there) >> 1
                block = hashes[middle]
                ahead.append((middle, gets[block & 255](block)))
        found.append((at + 1, held))
        return found

    def _set(self, workers: int) -> int:
        """The one object of a set."""
        found = self._sets.get(workers)
        if found is None:
            if len(self._sets) >= MAX_INTERNED:
                self._sets.clear()
            self._sets[workers] = found = workers
        return found

    def _name(self, workers: int) -> tuple[str, ...]:
        """The names in a set."""
        if len(self._members) >= MAX_INTERNED:
            self._members.clear()
        names, rest = [], workers
        while rest:
            low = rest & -rest
            names.append(self._names[low.bit_length() - 1])
            rest ^= low
        self._members[workers] = made = tuple(names)
        return made

    def _sweep(self) -> None:
        """Have one more part of the map forget who was dropped."""
