"""The choice between loading KV blocks from a slow place and computing them."""

from __future__ import annotations

from collections.abc import Iterable


def count_useful_runs(
    runs: Iterable[tuple[int, float]], compute_time: float, hidden_time: float = 0.0
) -> int:
    """Return how many of the leading runs of blocks to load, so that most time is saved; 0: none.

    Each run is (its blocks, the time until it and those before it are loaded). Computing a block
    takes `compute_time`. The first `hidden_time` of a load costs nothing, because the engine
    computes other prompts. All times have one unit.
    """
    best, best_saved, blocks = 0, 0.0, 0
    for number, (count, loaded_at) in enumerate(runs, 1):
        blocks += count
        saved = blocks * compute_time - max(0.0, loaded_at - hidden_time)
        if saved > best_saved:
            best, best_saved = number, saved
    return best
