"""One step as rows of one matrix: first the decoding sequences, sorted by slot, then the prompts'
spans, one after the other."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

SPLIT_COST_TOKENS = 96
"""Attention over neighbouring slots is one call, as long as the longest of them: to pad costs
memory traffic, to split costs calls. One call costs about as much as so many tokens of padding."""

SPLIT_TOKENS = 2048
"""Decoding rows go to several threads when together they attend to so many positions."""


class Work(msgspec.Struct, frozen=True):
    """Compute `tokens` at positions `start` and on of the sequence in `slot`."""

    slot: int
    start: int
    tokens: Any
    samples: bool


class Run(msgspec.Struct, frozen=True):
    """Decoding rows `low` to `high` in neighbouring slots from `slot` on; the longest of them has
    `length` positions, the last one is the row's own."""

    low: int
    high: int
    slot: int
    length: int


class Span(msgspec.Struct, frozen=True):
    """Rows `low` to `high` are positions `start` and on of the sequence in `slot`."""

    low: int
    high: int
    slot: int
    start: int


class Ragged(msgspec.Struct, frozen=True):
    """`ids`, `positions`: one a row. `slots`: one a decoding row. `parts`: runs to be computed side
    by side. `samples`: the rows whose next token is wanted, in the order of the work."""

    ids: Ints
    positions: Ints
    slots: Ints
    parts: tuple[tuple[Run, ...], ...]
    spans: tuple[Span, ...]
    samples: Ints


def lay_out(work: Listed[Work], threads: int = 1) -> Ragged:
    """Rows for `work`; decoding rows are cut into at most `threads` parts of like weight."""
    import numpy as np

    order = sorted(range(len(work)), key=lambda i: (len(work[i].tokens) > 1, work[i].slot))
    last_row = [0] * len(work)
    spans: list[Span] = []
    lengths: list[int] = []
    row = 0
    for index in order:
        one = work[index]
        count = len(one.tokens)
        if count == 1:
            lengths.append(one.start + 1)
        else:
            spans.append(Span(row, row + count, one.slot, one.start))
        row += count
        last_row[index] = row - 1
    decoding = len(lengths)
    slots = [work[index].slot for index in order[:decoding]]
    return Ragged(
        np.concatenate([np.asarray(work[index].tokens, np.int64) for index in order]),
        np.concatenate([work[index].start + np.arange(len(work[index].tokens)) for index in order]),
        np.asarray(slots, np.int64),
        tuple(_runs(slots, lengths, low, high) for low, high in _parts(lengths, threads)),
        tuple(spans),
        np.asarray([last_row[i] for i, one in enumerate(work) if one.samples], np.int64),
    )


def _parts(lengths: list[int], threads: int) -> list[tuple[int, int]]:
    """Cut rows into parts of about equal sums: a row belongs where its middle lies."""
    total = sum(lengths)
    if total < SPLIT_TOKENS:
        threads = 1
    borders, done, part = [0], 0, 0
    for row, length in enumerate(lengths):
        own = (2 * done + length) * threads // (2 * total)
        if own > part and row > borders[-1]:
            borders.append(row)
        part = own
        done += length
    borders.append(len(lengths))
    return list(pairwise(borders)) if lengths else []


def _runs(slots: list[int], lengths: list[int], low: int, high: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for row in range(low, high):
        slot, length = slots[row], lengths[row]
        if runs:
            last = runs[-1]
            rows = row - last.low
            longest = max(last.length, length)
            padding = longest * (rows + 1) - last.length * rows - length
            if slot == last.slot + rows and padding <= SPLIT_COST_TOKENS:
                runs[-1] = Run(last.low, row + 1, last.slot, longest)
                continue
        runs.append(Run(row, row + 1, slot, length))
    return tuple(runs)
