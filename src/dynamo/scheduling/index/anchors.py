"""A flat map from block hash to a run's number: plain ints, so that the garbage collector has
nothing to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

SHARD_COUNT: Final = 256
"""Parts of the map. A dict that grows copies itself at once: in parts, each copy is short."""

ANCHOR_BYTES: Final = 108
"""Upper bound: 48 for its hash, up to 60 for its place in the map just after a part has grown."""


class Anchors:
    """`gets[block & 255](block)`: the number of the run that it stands in, or None."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARD_COUNT)]
        self.shard_getters: list[Callable[[int], int | None]] = [
            shard.get for shard in self._shards
        ]
        self.count = 0

    def put(self, block: int, name: int) -> None:
        """The block stands in this run; whatever was said of it before."""
        shard = self._shards[block & 255]
        before = len(shard)
        shard[block] = name
        self.count += len(shard) - before

    def remove(self, blocks: Iterable[int], name: int) -> list[int]:
        """None of these stands in this run any more; those that stand in another."""
        shards = self._shards
        others = []
        for block in blocks:
            shard = shards[block & 255]
            if block in shard:
                if shard[block] == name:
                    del shard[block]
                    self.count -= 1
                else:
                    others.append(block)
        return others

    def find_in_other_runs(self, blocks: Iterable[int], name: int) -> list[int]:
        """Those that stand in another run than this."""
        shards = self._shards
        return [
            block
            for block in blocks
            if block in (shard := shards[block & 255]) and shard[block] != name
        ]
