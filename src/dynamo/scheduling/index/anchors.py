"""A flat map from block hash to run number. Plain ints keep the garbage collector out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

SHARD_COUNT: Final = 256
"""Number of dicts that share the map. A dict copies itself when it grows; small ones are fast."""

ANCHOR_BYTES: Final = 108
"""Upper bound: 48 bytes for the hash, up to 60 for the map entry just after a shard has grown."""


class Anchors:
    """The map. `shard_getters[block & 255](block)` returns the number of a block's run, or None."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARD_COUNT)]
        self.shard_getters: list[Callable[[int], int | None]] = [
            shard.get for shard in self._shards
        ]
        self.count = 0

    def put(self, block: int, run_number: int) -> None:
        """Map a block to a run, replacing an older entry."""
        shard = self._shards[block & 255]
        before = len(shard)
        shard[block] = run_number
        self.count += len(shard) - before

    def remove(self, blocks: Iterable[int], run_number: int) -> list[int]:
        """Remove the entries of blocks in this run. Return the blocks in other runs."""
        shards = self._shards
        others = []
        for block in blocks:
            shard = shards[block & 255]
            if block in shard:
                if shard[block] == run_number:
                    del shard[block]
                    self.count -= 1
                else:
                    others.append(block)
        return others

    def find_in_other_runs(self, blocks: Iterable[int], run_number: int) -> list[int]:
        """Return the blocks that are mapped to another run."""
        shards = self._shards
        return [
            block
            for block in blocks
            if block in (shard := shards[block & 255]) and shard[block] != run_number
        ]
