"""A gated MLP, cut along its inner width: every thread does one piece from the rows to a sum over
its own part, so that the threads meet once."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.inference.native.products import BLOCK_COLUMNS, Matrix, block_matrix, multiply_here

if TYPE_CHECKING:
    from dynamo.inference.native.arena import Arena
    from dynamo.inference.native.crew import Crew
    from dynamo.inference.native.scratch import Scratch

Floats = np.ndarray[Any, np.dtype[np.float32]]

LEAD_UNITS = 2
"""Blocks of columns that the caller's piece has more than the others', where there are many: it
starts at once, the other threads have to wake."""

TILE_ROWS = 32
"""Rows of the gate at once: what the passes touch stays in the L2 cache."""


class Piece:
    """Some of the inner columns: -gate and -up side by side, and the rows of down below them."""

    __slots__ = ("down", "gate_up", "width")

    def __init__(self, gate_up: Matrix, down: Matrix, width: int) -> None:
        self.gate_up = gate_up
        self.down = down
        self.width = width


def cut(
    gate: Floats, up: Floats, down: Floats, threads: int, small_kernels: bool, empty: Arena
) -> tuple[Piece, ...]:
    """Pieces of about equal width, one a thread, the caller's first, from weights [out, in]."""
    inner = len(gate)
    units = -(-inner // BLOCK_COLUMNS)
    pieces = min(threads, units)
    lead = LEAD_UNITS if units >= 16 * pieces > 16 else 0
    ends = [0, *(lead + (units - lead) * part // pieces for part in range(1, pieces + 1))]
    borders = [min(inner, end * BLOCK_COLUMNS) for end in ends]
    return tuple(
        Piece(
            block_matrix((-gate[low:high], -up[low:high]), 1, small_kernels, empty),
            block_matrix((down[:, low:high],), 1, small_kernels, empty),
            high - low,
        )
        for low, high in pairwise(borders)
    )


def add_gated(
    total: Floats, rows: Floats, pieces: tuple[Piece, ...], scratch: Scratch, crew: Crew
) -> None:
    """total += (silu(rows @ gate) * (rows @ up)) @ down."""
    count, width = len(rows), total.shape[1]
    sums = [scratch(f"sum{part}", count, piece.down.padded) for part, piece in enumerate(pieces)]
    jobs = [
        partial(
            _piece,
            rows,
            piece,
            scratch(f"gate_up{part}", count, piece.gate_up.padded),
            scratch(f"gated{part}", count, piece.width),
            sums[part],
        )
        for part, piece in enumerate(pieces)
    ]

    def own() -> None:
        jobs[0]()
        np.add(total, sums[0][:, :width], out=total)

    crew.each([own, *jobs[1:]])
    for one in sums[1:]:
        total += one[:, :width]


def _piece(rows: Floats, piece: Piece, gate_up: Floats, gated: Floats, out: Floats) -> None:
    multiply_here(rows, piece.gate_up, gate_up)
    width = piece.width
    for top in range(0, len(rows), TILE_ROWS):
        part = gate_up[top : top + TILE_ROWS]
        _silu_times(part[:, :width], part[:, width : 2 * width], gated[top : top + TILE_ROWS])
    multiply_here(gated, piece.down, out)


def _silu_times(minus_gate: Floats, minus_up: Floats, out: Floats) -> None:
    """silu(gate) * up. Both come negated, which saves a pass; `minus_gate` is changed."""
    np.exp(minus_gate, out=out)
    out += 1.0
    minus_gate *= minus_up
    np.divide(minus_gate, out, out=out)
