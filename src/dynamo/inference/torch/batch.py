"""A step as rows of one matrix, with the block tables of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from dynamo.inference.model_runner import StepChunk


class Span(NamedTuple):
    """Rows `low` to `high`, the last positions of a sequence that then has `length` of them."""

    low: int
    high: int
    length: int


class PagedBatch(NamedTuple):
    """The rows of a step on the device: first those of sequences that compute one token.

    - `token_ids`, `positions`, `slots`: [rows]; slot = block id * block_tokens + token
    - `lengths`: [sequences], positions of each, those of this step included
    - `first_rows`: [sequences + 1], the first row of each, then the number of rows
    - `tables`: [sequences, blocks], block ids; beyond the length of a sequence: 0
    - `sampled_rows`: [samples], rows whose next token is sampled, in the order of the chunks
    - `spans`: the sequences once more for the host; `decoding`: how many compute one token
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    first_rows: torch.Tensor
    tables: torch.Tensor
    sampled_rows: torch.Tensor
    spans: Sequence[Span]
    decoding: int


def row_order(chunks: Sequence[StepChunk]) -> list[int]:
    """Return the numbers of the chunks in the order of their rows."""
    return sorted(range(len(chunks)), key=lambda number: chunks[number].count > 1)


def make_paged_batch(
    chunks: Sequence[StepChunk],
    block_tokens: int,
    device: torch.device,
    token_ids: torch.Tensor | None = None,
) -> PagedBatch:
    """Build the rows of a step. All of them go to the device in one copy. `token_ids`: those of
    the rows, if they are there already and the host does not know them."""
    order = row_order(chunks)
    ordered = [chunks[number] for number in order]
    counts = np.array([chunk.count for chunk in ordered])
    starts = np.array([chunk.start for chunk in ordered])
    lengths = starts + counts
    first_rows = np.concatenate(([0], np.cumsum(counts)))
    sequence_of_row = np.repeat(np.arange(len(ordered)), counts)
    positions = np.arange(first_rows[-1]) + (starts - first_rows[:-1])[sequence_of_row]
    tables = np.zeros((len(ordered), -(-int(lengths.max()) // block_tokens)), np.int64)
    for table, chunk, length in zip(tables, ordered, lengths.tolist(), strict=True):
        used = -(-length // block_tokens)
        table[:used] = [block.id for block in chunk.blocks[:used]]
    blocks = tables[sequence_of_row, positions // block_tokens]
    last_rows = np.empty(len(chunks), np.int64)
    last_rows[order] = first_rows[1:] - 1
    parts: list[Any] = [
        positions if token_ids is not None else _token_ids(ordered),
        positions,
        blocks * block_tokens + positions % block_tokens,
        lengths,
        first_rows,
        tables.reshape(-1),
        last_rows[[chunk.samples for chunk in chunks]],
    ]
    tensors = _upload(parts, device)
    if token_ids is not None:
        tensors[0] = token_ids
    tensors[5] = tensors[5].view(tables.shape)
    edges = (first_rows[:-1], first_rows[1:], lengths)
    spans = list(map(Span, *(edge.tolist() for edge in edges)))
    return PagedBatch._make([*tensors, spans, int((counts == 1).sum())])


def _token_ids(chunks: Sequence[StepChunk]) -> Any:
    spans = [(chunk.sequence.tokens, chunk.start, chunk.start + chunk.count) for chunk in chunks]
    return np.concatenate([tokens[start:end] for tokens, start, end in spans])


def make_spare_batch(
    sequences: int, tokens: int, width: int, block: int, block_tokens: int, device: torch.device
) -> PagedBatch:
    """Return a step of `sequences` with `tokens` positions each, all in one block that belongs to
    none. Block tables have room for `width` blocks."""
    rows = sequences * tokens

    def filled(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    positions = torch.arange(rows, device=device) % tokens
    first_rows = torch.arange(sequences + 1, device=device) * tokens
    return PagedBatch(
        filled(0, rows),
        positions,
        block * block_tokens + positions % block_tokens,
        filled(tokens, sequences),
        first_rows,
        filled(block, sequences, width),
        first_rows[1:] - 1,
        [Span(low, low + tokens, tokens) for low in range(0, rows, tokens)],
        sequences if tokens == 1 else 0,
    )


def _upload(parts: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    joined = torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.split([len(part) for part in parts]))
