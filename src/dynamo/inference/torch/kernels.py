"""Triton kernels: attention over block tables, rotation that writes keys into blocks, gated MLPs.

Softmax is computed online in float32, in base 2. A program reads the blocks of one sequence for
one kv head, with the queries of all heads that share it. `attend_blocks` in `attention.py` is the
reference. Source: FlashAttention-2, Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from dynamo.inference.torch.batch import PagedBatch

KEY_TILE = 64
"""Positions that a program reads at once."""
QUERY_TILE = 64
"""Rows of a tile of prefill: positions times the query heads of a kv head."""
MIN_QUERY_ROWS = 16
"""The fewest rows of a matrix that tensor cores multiply."""
GATE_TILE = 1024
PROGRAMS = 512
MAX_PARTS = 32
"""Decoding is split over the length of sequences until there are about so many programs, and into
at most so many parts."""


@triton.jit
def _attend_tile(
    queries, query_positions, kv, table, first, end,
    stride_block, stride_value, dim: tl.constexpr, padded_dim: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    key_tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Return the sums of weights and of weighted values, and the maxima, of positions `first` to
    `end`. `kv` points to the kv head of a layer in block 0."""
    best = tl.full((rows,), -float("inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, padded_dim), tl.float32)
    columns = tl.arange(0, padded_dim)
    in_head = columns < dim
    for start in range(first, end, key_tile):
        positions = start + tl.arange(0, key_tile)
        known = positions < end
        blocks = tl.load(table + positions // block_tokens, mask=known, other=0)
        tokens = blocks * stride_block + positions % block_tokens * dim
        readable = known[:, None] & in_head[None, :]
        keys = tl.load(kv + tokens[:, None] + columns[None, :], mask=readable, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if softcap > 0.0:
            scaled = scores / softcap
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scaled)))  # tanh
        visible = known[None, :] & (positions[None, :] <= query_positions[:, None])
        if window > 0:
            visible = visible & (positions[None, :] > query_positions[:, None] - window)
        scores = tl.where(visible, scores * 1.4426950408889634, -float("inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            kv + stride_value + tokens[:, None] + columns[None, :], mask=readable, other=0.0
        )
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = highest
    return best, total, mixed


@triton.jit
def _prefill_kernel(
    queries, kv, out, tables, lengths, first_rows, tile_sequences, tile_starts,
    stride_table, stride_block, stride_value, stride_head,
    heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    key_tile: tl.constexpr, positions_in_tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a sequence's positions for one kv head. A row is a position and a head."""
    sequence = tl.load(tile_sequences + tl.program_id(0))
    tile_start = tl.load(tile_starts + tl.program_id(0))
    kv_head = tl.program_id(1)
    low = tl.load(first_rows + sequence)
    count = tl.load(first_rows + sequence + 1) - low
    length = tl.load(lengths + sequence)
    row = tl.arange(0, rows)
    place = tile_start + row // group
    valid = (place < count) & (row // group < positions_in_tile)
    columns = tl.arange(0, padded_dim)
    offsets = ((low + place) * heads + kv_head * group + row % group) * dim
    pointers = offsets[:, None] + columns[None, :]
    mask = valid[:, None] & (columns < dim)[None, :]
    tile = tl.load(queries + pointers, mask=mask, other=0.0)
    query_positions = length - count + place
    first_position = length - count + tile_start
    first = 0
    if window > 0:
        first = tl.maximum(0, first_position + 1 - window) // key_tile * key_tile
    end = tl.minimum(length, first_position + positions_in_tile)
    _, total, mixed = _attend_tile(
        tile, query_positions, kv + kv_head * stride_head, tables + sequence * stride_table,
        first, end, stride_block, stride_value, dim, padded_dim,
        block_tokens, window, softcap, key_tile, rows,
    )  # fmt: skip
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + pointers, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_kernel(
    queries, kv, partial, tables, lengths,
    stride_table, stride_block, stride_value, stride_head, parts, sequences,
    heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    block_tokens: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    key_tile: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Compute one part of a sequence's positions for the newest one and one kv head. `partial` is
    [parts, sequences, heads, dim + 2] float32: weighted values, their sum of weights, the maximum.
    """
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    lowest = 0
    if window > 0:
        lowest = tl.maximum(0, length - window) // key_tile * key_tile
    tiles = tl.cdiv(tl.cdiv(length - lowest, key_tile), parts)
    first = lowest + part * tiles * key_tile
    end = tl.minimum(length, first + tiles * key_tile)
    row = tl.arange(0, rows)
    columns = tl.arange(0, padded_dim)
    mask = (row < group)[:, None] & (columns < dim)[None, :]
    head = kv_head * group + row
    tile = tl.load(
        queries + (sequence * heads + head)[:, None] * dim + columns[None, :], mask=mask, other=0.0
    )
    best, total, mixed = _attend_tile(
        tile, length - 1 + row * 0, kv + kv_head * stride_head, tables + sequence * stride_table,
        first, end, stride_block, stride_value, dim, padded_dim,
        block_tokens, window, softcap, key_tile, rows,
    )  # fmt: skip
    place = partial + ((part * sequences + sequence) * heads + head) * (dim + 2)
    tl.store(place[:, None] + columns[None, :], mixed, mask=mask)
    tl.store(place + dim, total, mask=row < group)
    tl.store(place + dim + 1, best, mask=row < group)


@triton.jit
def _combine_kernel(
    partial, out, parts, rows_total, dim: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    """Join the parts of one sequence and head."""
    row = tl.program_id(0)
    columns = tl.arange(0, padded_dim)
    mask = columns < dim
    best = -float("inf")
    total = 0.0
    mixed = tl.zeros((padded_dim,), tl.float32)
    for part in range(parts):
        place = partial + (part * rows_total + row) * (dim + 2)
        part_best = tl.load(place + dim + 1)
        highest = tl.maximum(best, part_best)
        base = tl.where(highest == -float("inf"), 0.0, highest)
        shrink, weight = tl.exp2(best - base), tl.exp2(part_best - base)
        total = total * shrink + tl.load(place + dim) * weight
        mixed = mixed * shrink + tl.load(place + columns, mask=mask, other=0.0) * weight
        best = highest
    result = mixed / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * dim + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    qkv, factors, cosines, sines, slots, queries, kv,
    stride_block, stride_value, stride_head, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, half_dim: tl.constexpr,
    half_padded: tl.constexpr, half_rotary: tl.constexpr, block_tokens: tl.constexpr,
    normed: tl.constexpr, rotated: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head of one row: a query goes to `queries`, a key into its block, and so
    does a value as it is. The even and the odd elements of a head are those of its pairs."""
    row, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, half_padded)
    mask = pair < half_dim
    source = qkv + (row * (heads + 2 * kv_heads) + head) * dim + 2 * pair
    even = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        if normed:
            mean = tl.sum(even * even + odd * odd, 0) / dim
            scale = 1.0 / tl.sqrt(mean + eps)
            factor = factors + head * dim + 2 * pair
            even = even * scale * tl.load(factor, mask=mask, other=0.0)
            odd = odd * scale * tl.load(factor + 1, mask=mask, other=0.0)
        if rotated:
            turned = pair < half_rotary
            cosine = tl.load(cosines + row * half_rotary + pair, mask=turned, other=1.0)
            sine = tl.load(sines + row * half_rotary + pair, mask=turned, other=0.0)
            even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    if head < heads:
        target = queries + (row * heads + head) * dim + 2 * pair
        tl.store(target, even.to(queries.dtype.element_ty), mask=mask)
        tl.store(target + 1, odd.to(queries.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + row)
        is_value = head >= heads + kv_heads
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        place = slot // block_tokens * stride_block + slot % block_tokens * dim
        place += tl.where(is_value, stride_value, 0) + kv_head * stride_head
        tl.store(kv + place + 2 * pair, even.to(kv.dtype.element_ty), mask=mask)
        tl.store(kv + place + 2 * pair + 1, odd.to(kv.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(gate_up, out, inner, silu: tl.constexpr, size: tl.constexpr):
    """Compute a part of one row of activation(gate) * up."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * size + tl.arange(0, size)
    mask = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if not silu:  # gelu(x) by tanh(y) is x * sigmoid(2 * y)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out + row * inner + columns, result.to(out.dtype.element_ty), mask=mask)


class PrefillTiles(NamedTuple):
    """The tiles of the sequences of a step that compute several positions: [tiles] each."""

    sequences: torch.Tensor
    starts: torch.Tensor


def make_prefill_tiles(batch: PagedBatch, group: int) -> PrefillTiles:
    """Cut the prompts of a step into tiles for kv heads with `group` query heads each."""
    size = max(1, QUERY_TILE // group)
    tiles = [
        (number, start)
        for number, span in enumerate(batch.spans[batch.decoding :], batch.decoding)
        for start in range(0, span.high - span.low, size)
    ]
    device = batch.token_ids.device
    if not tiles:  # no copy, which a graph cannot hold
        return PrefillTiles(*torch.empty((2, 0), dtype=torch.int64, device=device))
    return PrefillTiles(*torch.tensor(tiles, dtype=torch.int64).T.contiguous().to(device))


def attend(
    queries: torch.Tensor,
    kv_blocks: torch.Tensor,
    batch: PagedBatch,
    tiles: PrefillTiles,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return what `attend_blocks` does: [rows, heads, head_dim]."""
    out = torch.empty_like(queries)
    heads, dim = queries.shape[1:]
    kv_heads, block_tokens = kv_blocks.shape[2:4]
    group, padded_dim = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    stride_block, stride_value, stride_head = kv_blocks.stride()[:3]
    strides = batch.tables.stride(0), stride_block, stride_value, stride_head
    shape = heads, group, dim, padded_dim, block_tokens, window, softcap, KEY_TILE
    if len(tiles.sequences):
        size = max(1, QUERY_TILE // group)
        rows = max(MIN_QUERY_ROWS, triton.next_power_of_2(size * group))
        _prefill_kernel[len(tiles.sequences), kv_heads](
            queries, kv_blocks, out, batch.tables, batch.lengths, batch.first_rows, *tiles,
            *strides, *shape, size, rows,
        )  # fmt: skip
    if count := batch.decoding:
        parts = min(MAX_PARTS, max(1, PROGRAMS // (count * kv_heads)))
        partial = queries.new_empty((parts, count, heads, dim + 2), dtype=torch.float32)
        rows = max(MIN_QUERY_ROWS, triton.next_power_of_2(group))
        _decode_kernel[count, kv_heads, parts](
            queries, kv_blocks, partial, batch.tables, batch.lengths, *strides, parts, count,
            *shape, rows,
        )  # fmt: skip
        _combine_kernel[(count * heads,)](partial, out, parts, count * heads, dim, padded_dim)
    return out


def rotate(
    qkv: torch.Tensor,
    kv_blocks: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    *,
    rotation: Sequence[torch.Tensor] | None,
    factors: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return the queries of `qkv` [rows, (heads + 2 kv heads) * head_dim], normed by `factors` and
    rotated by `rotation`: cosines and sines, [rows, rotary_dim / 2]. Keys and values go to the
    `slots` of `kv_blocks`."""
    kv_heads, block_tokens, dim = kv_blocks.shape[2:]
    queries = qkv.new_empty(len(qkv), heads, dim)
    cosines, sines = rotation or (qkv, qkv)
    _rotate_kernel[len(qkv), heads + 2 * kv_heads](
        qkv, qkv if factors is None else factors, cosines, sines, slots, queries, kv_blocks,
        *kv_blocks.stride()[:3], eps,
        heads, kv_heads, dim, dim // 2, triton.next_power_of_2(dim // 2),
        cosines.shape[1] if rotation else 0, block_tokens, factors is not None,
        rotation is not None,
    )  # fmt: skip
    return queries


def gate_rows(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return what `gate_rows` of the backend does."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if rows:
        grid = rows, triton.cdiv(inner, GATE_TILE)
        _gate_kernel[grid](gate_up, out, inner, activation == "silu", GATE_TILE)
    return out
