"""The memory of removed blocks measures how many of them prompts ask for again."""

from __future__ import annotations

import pytest
from tests.unit.index.conftest import ManualClock

from dynamo.core.values import BlocksRemoved, BlocksStored
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.removed_blocks import (
    EXPECTED_REMOVALS,
    MAX_REMOVED_BLOCKS,
    RemovedBlocks,
)

BLOCKS = range(MAX_REMOVED_BLOCKS // 4)


def share_of(asked_blocks: float, removed: float) -> object:
    """Return the share of removed blocks that prompts asked for, with the expected removals."""
    return pytest.approx(asked_blocks / (removed + EXPECTED_REMOVALS / len(BLOCKS)), rel=0.001)


def test_the_share_counts_removed_blocks_that_a_prompt_asks_for() -> None:
    removed = RemovedBlocks()
    removed.on_prompt(BLOCKS, 0.0)  # asked for before their removal
    assert removed.asked_share == 0.0

    removed.on_removed(BLOCKS)
    assert removed.asked_share == 0.0
    removed.on_prompt(BLOCKS[:25_000], 0.0)
    assert removed.asked_share == share_of(0.25, 1.0)


def test_a_removal_counts_once_and_each_removal_anew() -> None:
    removed = RemovedBlocks()
    removed.on_removed(BLOCKS)
    for _ in range(3):
        removed.on_prompt(BLOCKS[:50_000], 0.0)
    assert removed.asked_share == share_of(0.5, 1.0)

    removed.on_removed(BLOCKS[:50_000])
    assert removed.asked_share == share_of(0.5, 1.5)
    removed.on_prompt(BLOCKS[:50_000], 0.0)
    assert removed.asked_share == share_of(1.0, 1.5)


@pytest.mark.parametrize("event_blocks", [64, 3 * MAX_REMOVED_BLOCKS])
def test_old_removals_are_forgotten(event_blocks: int) -> None:
    removed = RemovedBlocks()
    removed.on_removed(BLOCKS)
    removed.on_prompt(BLOCKS, 0.0)
    assert removed.asked_share == share_of(1.0, 1.0)

    newer = range(MAX_REMOVED_BLOCKS, 4 * MAX_REMOVED_BLOCKS)
    for start in range(0, len(newer), event_blocks):
        removed.on_removed(newer[start : start + event_blocks])
    removed.on_prompt(BLOCKS, 0.0)
    assert removed.asked_share == 0.0
    removed.on_prompt(newer, 0.0)
    assert removed.asked_share > 0.8


def test_the_memory_is_bounded() -> None:
    removed = RemovedBlocks()
    removed.on_removed(range(5 * MAX_REMOVED_BLOCKS))
    held = len(removed._recent.waiting) + len(removed._older.waiting)

    assert 0 < held <= MAX_REMOVED_BLOCKS // 8


def test_a_view_remembers_what_workers_remove_from_the_device(clock: ManualClock) -> None:
    view = CacheView(clock)
    chain = list(range(1, 81))

    def store_and_remove(tier: str) -> None:
        view.apply("a", [BlocksStored(parent=0, hashes=chain, tier=tier)])
        view.apply("a", [BlocksRemoved(hashes=chain, tier=tier)])

    store_and_remove("device")  # nobody asks: nothing is kept
    view.removed_blocks = removed = RemovedBlocks()
    removed.on_prompt(chain, 0.0)
    assert removed.asked_share == 0.0
    store_and_remove("host")
    removed.on_prompt(chain, 0.0)
    assert removed.asked_share == 0.0
    store_and_remove("device")
    removed.on_prompt(chain, 0.0)
    assert removed.asked_share > 0.0


def test_the_share_of_prompts_in_caches_stands_for_removals_not_yet_seen() -> None:
    removed = RemovedBlocks()
    for start in range(0, EXPECTED_REMOVALS, 100):
        removed.on_prompt(BLOCKS[start : start + 100], 0.8)
    assert removed.asked_share == pytest.approx(0.8)

    removed.on_removed(range(MAX_REMOVED_BLOCKS, 2 * MAX_REMOVED_BLOCKS))
    assert removed.asked_share < 0.1
