"""Which blocks move down a tier first, and how prompts hit the blocks of a prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dynamo.library.radix_tree import KVBlock, MatchingBlocks

HitPattern = Literal["none", "full", "prefix", "scattered"]


class LRUCachePolicy:
    """Orders blocks by their last use. `config` is accepted for compatibility; no option exists."""

    def __init__(self, config: Any = None) -> None:
        del config
        self._blocks: OrderedDict[str | int, KVBlock] = OrderedDict()

    async def on_allocation(self, blocks: Iterable[KVBlock]) -> None:
        """Add new blocks as the most recently used ones."""
        for block in blocks:
            self._blocks[block.id] = block

    def on_access(self, blocks: Iterable[KVBlock]) -> None:
        """Note that known blocks were used."""
        for block in blocks:
            if block.id in self._blocks:
                self._blocks.move_to_end(block.id)

    def on_removal(self, blocks: Iterable[KVBlock]) -> None:
        """Forget blocks."""
        for block in blocks:
            self._blocks.pop(block.id, None)

    def select_victims(self, count: int) -> Sequence[KVBlock]:
        """Return up to `count` blocks whose last use is longest ago."""
        return [block for _, block in zip(range(count), self._blocks.values(), strict=False)]


class AccessPatternAnalyzer:
    """Counts the uses of blocks and names the pattern of a hit."""

    def __init__(self) -> None:
        self.access_counts: Counter[str | int] = Counter()

    def record_access(self, blocks: Iterable[KVBlock]) -> None:
        """Count one use of each block."""
        self.access_counts.update(block.id for block in blocks)

    def analyze_hit_pattern(self, matching_blocks: MatchingBlocks) -> HitPattern:
        """Return "full" if all blocks are held, "prefix" if the first ones are, "scattered" if
        others are, and "none" without a hit."""
        cached = {block.id for block in matching_blocks.cached_blocks}
        held = [block.id in cached for block in matching_blocks.all_blocks]
        if not any(held):
            return "none"
        if all(held):
            return "full"
        return "prefix" if not any(held[held.index(False) :]) else "scattered"
