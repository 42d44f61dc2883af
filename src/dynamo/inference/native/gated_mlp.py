"""A gated MLP, split along its inner width.

Each thread computes its shard from the rows to a partial sum, so the threads synchronize once.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dynamo.inference.native.blocked_matmul import (
    BLOCK_COLUMNS,
    BlockedMatrix,
    make_blocked_matrix,
    matmul_blocks,
)

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Arena, Floats, ScratchBuffers
    from dynamo.inference.native.thread_pool import ThreadPool

CALLER_EXTRA_BLOCKS = 2
"""Blocks of columns that the caller's shard has more than the others, if there are many blocks.

The caller starts at once, while the other threads have to wake up.
"""

TILE_ROWS = 32
"""Rows of the gate in one pass, so that the data stay in the L2 cache."""
GELU_CUBE = np.float32(0.044715)
GELU_SCALE = np.float32(math.sqrt(2 / math.pi))


class MlpShard(msgspec.Struct, frozen=True):
    """Some of the inner columns: -gate and -up side by side, and the matching rows of down.
    `activation` is a key of `ACTIVATIONS`."""

    gate_up: BlockedMatrix
    down: BlockedMatrix
    width: int
    activation: str


def shard_mlp(
    gate: Floats,
    up: Floats,
    down: Floats,
    activation: str,
    threads: int,
    small_kernels: bool,
    arena: Arena,
) -> tuple[MlpShard, ...]:
    """Split weights [out, in] into shards of like width, one a thread, the caller's first."""
    inner = len(gate)
    units = -(-inner // BLOCK_COLUMNS)
    pieces = min(threads, units)
    extra = CALLER_EXTRA_BLOCKS if units >= 16 * pieces > 16 else 0
    ends = [0, *(extra + (units - extra) * part // pieces for part in range(1, pieces + 1))]
    borders = [min(inner, end * BLOCK_COLUMNS) for end in ends]
    return tuple(
        MlpShard(
            make_blocked_matrix((-gate[low:high], -up[low:high]), 1, small_kernels, arena),
            make_blocked_matrix((down[:, low:high],), 1, small_kernels, arena),
            high - low,
            activation,
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
    """Compute total += (activation(rows @ gate) * (rows @ up)) @ down."""
    count, width = len(rows), total.shape[1]
    sums = [
        scratch(f"sum{part}", count, shard.down.padded_width) for part, shard in enumerate(shards)
    ]
    jobs = [
        partial(
            _compute_shard,
            rows,
            shard,
            scratch(f"gate_up{part}", count, shard.gate_up.padded_width),
            scratch(f"gated{part}", count, shard.width),
            sums[part],
        )
        for part, shard in enumerate(shards)
    ]

    def run_first_job() -> None:
        jobs[0]()
        np.add(total, sums[0][:, :width], out=total)

    thread_pool.run_jobs([run_first_job, *jobs[1:]])
    for partial_sum in sums[1:]:
        total += partial_sum[:, :width]


def _compute_shard(
    rows: Floats, shard: MlpShard, gate_up: Floats, gated: Floats, out: Floats
) -> None:
    matmul_blocks(rows, shard.gate_up, gate_up)
    width, activate = shard.width, ACTIVATIONS[shard.activation]
    for first_row in range(0, len(rows), TILE_ROWS):
        part = gate_up[first_row : first_row + TILE_ROWS]
        activate(
            part[:, :width], part[:, width : 2 * width], gated[first_row : first_row + TILE_ROWS]
        )
    matmul_blocks(gated, shard.down, out)


def _silu_and_mul(minus_gate: Floats, minus_up: Floats, out: Floats) -> None:
    """Compute silu(gate) * up into `out`; `minus_gate` is changed. Both inputs are negated, which
    saves a pass."""
    np.exp(minus_gate, out=out)
    out += 1.0
    minus_gate *= minus_up
    np.divide(minus_gate, out, out=out)


def _gelu_and_mul(minus_gate: Floats, minus_up: Floats, out: Floats) -> None:
    """Compute gelu(gate) * up into `out`, by the approximation with tanh. `minus_gate` is
    changed."""
    np.multiply(minus_gate, minus_gate, out=out)
    out *= GELU_CUBE
    out += 1.0
    out *= minus_gate
    out *= -GELU_SCALE
    np.tanh(out, out=out)
    out += 1.0
    minus_gate *= minus_up
    minus_gate *= 0.5
    out *= minus_gate


ACTIVATIONS = {"silu": _silu_and_mul, "gelu_tanh": _gelu_and_mul}
"""Functions (minus gate, minus up, out) that compute the activation of gate times up."""
