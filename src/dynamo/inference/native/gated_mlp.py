"""A gated MLP, cut along its inner width: every thread does one piece from the rows to a sum over
its own part, so that the threads meet once."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.inference.native.blocked_matmul import (
    BLOCK_COLUMNS,
    BlockedMatrix,
    make_blocked_matrix,
    matmul_on_this_thread,
)

if TYPE_CHECKING:
    from dynamo.inference.native.arena import Arena
    from dynamo.inference.native.scratch import ScratchBuffers
    from dynamo.inference.native.thread_pool import ThreadPool

Floats = np.ndarray[Any, np.dtype[np.float32]]

CALLER_EXTRA_BLOCKS = 2
"""Blocks of columns that the caller's piece has more than the others', where there are many: it
starts at once, the other threads have to wake."""

TILE_ROWS = 32
"""Rows of the gate at once: what the passes touch stays in the L2 cache."""


class MlpShard:
    """Some of the inner columns: -gate and -up side by side, and the rows of down below them."""

    __slots__ = ("down", "gate_up", "width")

    def __init__(self, gate_up: BlockedMatrix, down: BlockedMatrix, width: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.width = width


def shard_mlp(
    gate: Floats, up: Floats, down: Floats, threads: int, small_kernels: bool, arena: Arena
) -> tuple[MlpShard, ...]:
    """Pieces of about equal width, one a thread, the caller's first, from weights [out, in]."""
    inner = len(gate)
    units = -(-inner // BLOCK_COLUMNS)
    pieces = min(threads, units)
    lead = CALLER_EXTRA_BLOCKS if units >= 16 * pieces > 16 else 0
    ends = [0, *(lead + (units - lead) * part // pieces for part in range(1, pieces + 1))]
    borders = [min(inner, end * BLOCK_COLUMNS) for end in ends]
    return tuple(
        MlpShard(
            make_blocked_matrix((-gate[low:high], -up[low:high]), 1, small_kernels, arena),
            make_blocked_matrix((down[:, low:high],), 1, small_kernels, arena),
            high - low,
        )
        for low, high in pairwise(borders)
    )


def add_gated_mlp(
    total: Floats,
    rows: Floats,
    shards: tuple[MlpShard, ...],
    scratch: ScratchBuffers,
    thread_pool: ThreadPool,
) -> None:
    """total += (silu(rows @ gate) * (rows @ up)) @ down."""
    count, width = len(rows), total.shape[1]
    sums = [
        scratch(f"sum{part}", count, piece.down.padded_width) for part, piece in enumerate(shards)
    ]
    jobs = [
        partial(
            _compute_shard,
            rows,
            piece,
            scratch(f"gate_up{part}", count, piece.gate_up.padded_width),
            scratch(f"gated{part}", count, piece.width),
            sums[part],
        )
        for part, piece in enumerate(shards)
    ]

    def own() -> None:
        jobs[0]()
        np.add(total, sums[0][:, :width], out=total)

    thread_pool.run_jobs([own, *jobs[1:]])
    for one in sums[1:]:
        total += one[:, :width]


def _compute_shard(
    rows: Floats, piece: MlpShard, gate_up: Floats, gated: Floats, out: Floats
) -> None:
    matmul_on_this_thread(rows, piece.gate_up, gate_up)
    width = piece.width
    for top in range(0, len(rows), TILE_ROWS):
        part = gate_up[top : top + TILE_ROWS]
        _silu_and_mul(part[:, :width], part[:, width : 2 * width], gated[top : top + TILE_ROWS])
    matmul_on_this_thread(gated, piece.down, out)


def _silu_and_mul(minus_gate: Floats, minus_up: Floats, out: Floats) -> None:
    """silu(gate) * up. Both come negated, which saves a pass; `minus_gate` is changed."""
    np.exp(minus_gate, out=out)
    out += 1.0
    minus_gate *= minus_up
    np.divide(minus_gate, out, out=out)
