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

CALL_COST_TOKENS = 96
"""Attention over neighbouring slots is one call, as long as the longest of them: to pad costs
memory traffic, to split costs calls. One call costs about as much as so many tokens of padding."""

MIN_TOKENS_TO_SPLIT = 2048
"""Decoding rows go to several threads when together they attend to so many positions."""


class SlotChunk(msgspec.Struct, frozen=True):
    """Compute `tokens` at positions `start` and on of the sequence in `slot`."""

    slot: int
    start: int
    tokens: Any
    samples: bool


class DecodeRun(msgspec.Struct, frozen=True):
    """Decoding rows `low` to `high` in neighbouring slots from `slot` on; the longest of them has
    `length` positions, the last one is the row's own."""

    low: int
    high: int
    slot: int
    length: int


class PrefillSpan(msgspec.Struct, frozen=True):
    """Rows `low` to `high` are positions `start` and on of the sequence in `slot`."""

    low: int
    high: int
    slot: int
    start: int


class RaggedBatch(msgspec.Struct, frozen=True):
    """`ids`, `positions`: one a row. `slots`: one a decoding row. `parts`: runs to be computed side
    by side. `samples`: the rows whose next token is wanted, in the order of the work."""

    token_ids: Ints
    positions: Ints
    decode_slots: Ints
    decode_parts: tuple[tuple[DecodeRun, ...], ...]
    prefill_spans: tuple[PrefillSpan, ...]
    sampled_rows: Ints


def make_ragged_batch(chunks: Listed[SlotChunk], threads: int = 1) -> RaggedBatch:
    """Rows for `work`; decoding rows are cut into at most `threads` parts of like weight."""
    import numpy as np

    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].tokens) > 1, chunks[i].slot))
    last_row = [0] * len(chunks)
    spans: list[PrefillSpan] = []
    lengths: list[int] = []
    row = 0
    for index in order:
        one = chunks[index]
        count = len(one.tokens)
        if count == 1:
            lengths.append(one.start + 1)
        else:
            spans.append(PrefillSpan(row, row + count, one.slot, one.start))
        row += count
        last_row[index] = row - 1
    decoding = len(lengths)
    slots = [chunks[index].slot for index in order[:decoding]]
    return RaggedBatch(
        np.concatenate([np.asarray(chunks[index].tokens, np.int64) for index in order]),
        np.concatenate(
            [chunks[index].start + np.arange(len(chunks[index].tokens)) for index in order]
        ),
        np.asarray(slots, np.int64),
        tuple(
            _decode_runs(slots, lengths, low, high) for low, high in _split_rows(lengths, threads)
        ),
        tuple(spans),
        np.asarray([last_row[i] for i, one in enumerate(chunks) if one.samples], np.int64),
    )


def _split_rows(lengths: list[int], threads: int) -> list[tuple[int, int]]:
    """Cut rows into parts of about equal sums: a row belongs where its middle lies."""
    total = sum(lengths)
    if total < MIN_TOKENS_TO_SPLIT:
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


def _decode_runs(
    slots: list[int], lengths: list[int], low: int, high: int
) -> tuple[DecodeRun, ...]:
    runs: list[DecodeRun] = []
    for row in range(low, high):
        slot, length = slots[row], lengths[row]
        if runs:
            last = runs[-1]
            rows = row - last.low
            longest = max(last.length, length)
            padding = longest * (rows + 1) - last.length * rows - length
            if slot == last.slot + rows and padding <= CALL_COST_TOKENS:
                runs[-1] = DecodeRun(last.low, row + 1, last.slot, longest)
                continue
        runs.append(DecodeRun(row, row + 1, slot, length))
    return tuple(runs)
