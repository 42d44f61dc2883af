"""Runs: consecutive slots that are copied as one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Run = tuple[int, int]
"""(first slot, number of slots)."""


def merge_runs(slots: Sequence[int], limit: int) -> Iterator[Run]:
    """Yield the runs of ascending slots in order, each of at most `limit` slots."""
    first = length = 0
    for slot in slots:
        if length and slot == first + length and length < limit:
            length += 1
            continue
        if length:
            yield first, length
        first, length = slot, 1
    if length:
        yield first, length


def merge_pairs(
    sources: Sequence[int], targets: Sequence[int], limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, number) of slots that are consecutive on both sides."""
    source = target = length = 0
    for next_source, next_target in zip(sources, targets, strict=True):
        if (
            length
            and length < limit
            and next_source == source + length
            and next_target == target + length
        ):
            length += 1
            continue
        if length:
            yield source, target, length
        source, target, length = next_source, next_target, 1
    if length:
        yield source, target, length
