"""A bounded memory of blocks that left the workers' device memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

SAMPLING: Final = 8
"""The memory keeps one of so many blocks, chosen by its hash."""

MAX_REMOVED_BLOCKS: Final = 400_000
"""Removals that the memory stands for; half of them are forgotten at a time."""

GENERATION_BLOCKS: Final = MAX_REMOVED_BLOCKS // SAMPLING // 2


EXPECTED_REMOVALS: Final = 20_000
"""Blocks of prompts whose share in caches counts like as many removals. Until caches are full, the
share of blocks that prompts find there is all that tells how often blocks are asked for."""


class RemovedBlocks:
    """Measures how often prompts ask for blocks that were removed lately.

    `asked_share` is the share of these blocks that a prompt asked for after their removal: what the
    removal of a block costs, in units of computing it. While few blocks were removed, the share of
    blocks that prompts found in a cache stands for it. The two generations hold at most 50,000
    hashes, about 5 MB.
    """

    def __init__(self) -> None:
        self.asked_share = 0.0
        self._cached_share = 0.0
        self._prompt_blocks = 0
        self._is_remote = False
        self._recent, self._older = _Generation(), _Generation()

    def on_removed(self, hashes: Iterable[int]) -> None:
        """Remember the blocks that a worker removed."""
        sample = _sample(hashes)
        for start in range(0, len(sample), GENERATION_BLOCKS):
            recent = self._recent
            recent.waiting.update(sample[start : start + GENERATION_BLOCKS])
            if recent.count >= GENERATION_BLOCKS:
                self._recent, self._older = _Generation(), recent
        self._update_share()

    def on_prompt(self, hashes: Sequence[int], cached_share: float) -> None:
        """Note that a prompt asks for blocks, a share of which a worker holds. Each removal counts
        once."""
        if not hashes:
            return
        self._prompt_blocks = min(EXPECTED_REMOVALS, self._prompt_blocks + len(hashes))
        weight = min(1.0, len(hashes) / self._prompt_blocks)
        self._cached_share += (cached_share - self._cached_share) * weight
        sample = _sample(hashes)
        self._recent.on_asked(sample)
        self._older.on_asked(sample)
        self._update_share()

    def set_remote_share(self, share: float) -> None:
        """Use the share that a remote index measures, instead of what is measured here."""
        self.asked_share, self._is_remote = share, True

    def _update_share(self) -> None:
        if self._is_remote:
            return
        expected = EXPECTED_REMOVALS // SAMPLING
        asked_blocks = expected * self._cached_share
        asked_blocks += self._recent.asked_blocks + self._older.asked_blocks
        self.asked_share = asked_blocks / (self._recent.count + self._older.count + expected)


class _Generation:
    """Blocks removed in a stretch of time. `waiting`: those that no prompt asked for since."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.asked_blocks = 0

    @property
    def count(self) -> int:
        """The number of blocks, asked for or not."""
        return len(self.waiting) + self.asked_blocks

    def on_asked(self, hashes: list[int]) -> None:
        """Count the blocks among `hashes` that are here."""
        before = len(self.waiting)
        self.waiting.difference_update(hashes)
        self.asked_blocks += before - len(self.waiting)


def _sample(hashes: Iterable[int]) -> list[int]:
    return [block for block in hashes if not block % SAMPLING]
