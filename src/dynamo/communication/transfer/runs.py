"""Runs: consecutive slots that are copied as one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def merge_pairs(
    sources: Sequence[int], targets: Sequence[int], limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, number) of at most `limit` slots, consecutive on both sides."""
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
