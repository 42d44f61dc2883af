"""Runs: consecutive pieces of memory that are copied as one, and groups of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

TRANSFER_S: Final = 0.004
"""Time of one transfer of a pull: long against a request, short against a timeout. A cancelled pull
waits for the present one."""
MIN_TRANSFER_BYTES: Final = 64 << 10
MAX_TRANSFER_BYTES: Final = 8 << 20
MAX_PIECES: Final = 1024
"""Pieces of one transfer."""


def transfer_bytes(bytes_per_s: float) -> int:
    """Return the bytes of one transfer over a link: those of `TRANSFER_S`, within bounds."""
    return min(max(int(bytes_per_s * TRANSFER_S), MIN_TRANSFER_BYTES), MAX_TRANSFER_BYTES)


def merge_pairs(
    sources: Sequence[int], targets: Sequence[int], limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, number) of at most `limit` slots, consecutive on both sides."""
    yield from merge_pieces(zip(sources, targets, (1,) * len(sources), strict=True), limit)


def merge_pieces(
    pieces: Iterable[tuple[int, int, int]], limit: int
) -> Iterator[tuple[int, int, int]]:
    """Join pieces (source, target, length) that follow each other on both sides, while they are not
    longer than `limit` together."""
    source = target = length = 0
    for next_source, next_target, next_length in pieces:
        if (
            length
            and length + next_length <= limit
            and next_source == source + length
            and next_target == target + length
        ):
            length += next_length
            continue
        if length:
            yield source, target, length
        source, target, length = next_source, next_target, next_length
    if length:
        yield source, target, length


def group_pieces(sizes: Sequence[int], limit: int, most: int) -> Iterator[slice]:
    """Divide consecutive pieces into groups of at most `limit` bytes and `most` pieces; a larger
    piece is a group by itself."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (total + size > limit or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
