"""A step as rows of one matrix: first the decoding sequences by slot, then the prompt spans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

CALL_COST_TOKENS = 96
"""Cost of one attention call, in tokens of padding.

Neighbouring slots share a call that is as long as the longest of them. Padding costs memory
traffic, a split costs calls.
"""

MIN_TOKENS_TO_SPLIT = 2048
"""Decoding rows are split over threads if together they attend to this many positions."""


class SlotChunk(msgspec.Struct, frozen=True):
    """The tokens to compute at positions `start` and on of the sequence in `slot`."""

    slot: int
    start: int
    tokens: Any
    samples: bool


class DecodeRun(msgspec.Struct, frozen=True):
    """Decoding rows `low` to `high` in neighbouring slots, the first of which is `slot`. The
    longest sequence has `length` positions, including the new one."""

    low: int
    high: int
    slot: int
    length: int


class PrefillSpan(msgspec.Struct, frozen=True):
    """Rows `low` to `high`, which are positions `start` and on of the sequence in `slot`."""

    low: int
    high: int
    slot: int
    start: int


class RaggedBatch(msgspec.Struct, frozen=True):
    """The rows of a step.

    - `token_ids`, `positions`: one entry a row
    - `decode_slots`: one entry a decoding row
    - `decode_parts`: runs that different threads compute at the same time
    - `sampled_rows`: rows whose next token is sampled, in the order of the chunks
    """

    token_ids: Ints
    positions: Ints
    decode_slots: Ints
    decode_parts: tuple[tuple[DecodeRun, ...], ...]
    prefill_spans: tuple[PrefillSpan, ...]
    sampled_rows: Ints

    def first_row(self, slot: int) -> int:
        """Return the row of the first token of a slot's chunk."""
        for span in self.prefill_spans:
            if span.slot == slot:
                return span.low
        slots: list[int] = self.decode_slots.tolist()
        return slots.index(slot)


def make_ragged_batch(chunks: Sequence[SlotChunk], threads: int = 1) -> RaggedBatch:
    """Build the rows of a step. Decoding rows are split into at most `threads` equal parts."""
    import numpy as np

    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].tokens) > 1, chunks[i].slot))
    last_row = [0] * len(chunks)
    spans: list[PrefillSpan] = []
    lengths: list[int] = []
    row = 0
    for index in order:
        chunk = chunks[index]
        count = len(chunk.tokens)
        if count == 1:
            lengths.append(chunk.start + 1)
        else:
            spans.append(PrefillSpan(row, row + count, chunk.slot, chunk.start))
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
        np.asarray([last_row[i] for i, chunk in enumerate(chunks) if chunk.samples], np.int64),
    )


def _split_rows(lengths: list[int], threads: int) -> list[tuple[int, int]]:
    """Split rows into parts of about equal sums. A row belongs to the part that contains its
    middle."""
    total = sum(lengths)
    if total < MIN_TOKENS_TO_SPLIT:
        threads = 1
    borders, sum_before, part = [0], 0, 0
    for row, length in enumerate(lengths):
        row_part = (2 * sum_before + length) * threads // (2 * total)
        if row_part > part and row > borders[-1]:
            borders.append(row)
        part = row_part
        sum_before += length
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
