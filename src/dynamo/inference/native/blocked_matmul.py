"""Rows times weights, in blocks of columns.

OpenBLAS packs the weights anew for every product, which for a few rows costs more than the product.
Cut into blocks of 32 columns and tiles of rows, every product is small enough for the kernels that
pack nothing (2 to 4 times faster at 2 to 16 rows, 1.1 to 1.7 times above). Processors without such
kernels get one block a thread. A block stays in the L2 cache while the tiles of rows pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo.inference.native.blas import SMALL_KERNEL_MULTIPLICATIONS

if TYPE_CHECKING:
    from dynamo.inference.native.arena import Arena
    from dynamo.inference.native.thread_pool import ThreadPool

Floats = np.ndarray[Any, np.dtype[np.float32]]

BLOCK_COLUMNS = 32
TILE_ROW_MULTIPLE = 8
MAX_TILE_ROWS = 32
MIN_MULTIPLICATIONS_PER_THREAD = 4_000_000
MIN_WEIGHTS_PER_THREAD = 600_000
"""What a thread must have to do at least (about 50 us), for the hand-over to pay."""


class BlockedMatrix:
    """One linear layer's weights: [block][in][column of the block], zeros beyond `width`."""

    __slots__ = ("blocks", "tile_rows", "width")

    def __init__(self, blocks: Floats, width: int, tile_rows: int) -> None:
        self.blocks = blocks
        self.width = width
        self.tile_rows = tile_rows

    @property
    def padded_width(self) -> int:
        """Columns with those that only fill the last block."""
        blocks, _, size = self.blocks.shape
        return int(blocks * size)

    def columns(self, ids: Any) -> Floats:
        """[ids, in]: some columns."""
        size = self.blocks.shape[2]
        found: Floats = self.blocks[ids // size, :, ids % size]
        return found


def make_blocked_matrix(
    parts: tuple[Floats, ...], threads: int, small_kernels: bool, arena: Arena
) -> BlockedMatrix:
    """From weights [out, in], stacked along out."""
    width, depth = sum(part.shape[0] for part in parts), parts[0].shape[1]
    tile_rows = (
        SMALL_KERNEL_MULTIPLICATIONS
        // (BLOCK_COLUMNS * depth)
        // TILE_ROW_MULTIPLE
        * TILE_ROW_MULTIPLE
    )
    if small_kernels and tile_rows:
        size, tile_rows = BLOCK_COLUMNS, min(tile_rows, MAX_TILE_ROWS)
    else:
        size, tile_rows = -(-width // threads), 0
    blocks = arena(-(-width // size), depth, size)
    blocks[-1, :, (width - 1) % size + 1 :] = 0.0
    row = 0
    for part in parts:
        _fill_columns(blocks, part, row)
        row += part.shape[0]
    return BlockedMatrix(blocks, width, tile_rows)


def _fill_columns(blocks: Floats, part: Floats, row: int) -> None:
    """Put the rows of `part` in as columns, from column `row` on."""
    size, done = blocks.shape[2], 0
    while done < len(part):
        block, column = divmod(row + done, size)
        count = min(size - column, len(part) - done, 256)
        blocks[block, :, column : column + count] = part[done : done + count].T
        done += count


def matmul(rows: Floats, matrix: BlockedMatrix, out: Floats, thread_pool: ThreadPool) -> None:
    """out[rows, padded columns] = rows @ matrix."""
    _, depth, size = matrix.blocks.shape
    weights = depth * size
    least = min(
        MIN_WEIGHTS_PER_THREAD // weights, MIN_MULTIPLICATIONS_PER_THREAD // (weights * len(rows))
    )
    thread_pool.split_rows(
        len(matrix.blocks), max(1, least), partial(matmul_blocks, rows, matrix, out)
    )


def matmul_on_this_thread(rows: Floats, matrix: BlockedMatrix, out: Floats) -> None:
    """As `multiply`, on this thread."""
    matmul_blocks(rows, matrix, out, 0, len(matrix.blocks))


def matmul_blocks(rows: Floats, matrix: BlockedMatrix, out: Floats, low: int, high: int) -> None:
    """Some of the blocks' columns of `out`."""
    blocks, count = matrix.blocks[low:high], len(rows)
    size = blocks.shape[2]
    part = out[:, low * size : high * size].reshape(count, high - low, size)
    if count == 1:
        np.matmul(rows[0], blocks, out=part[0])
        return
    tile = _balanced_tile_rows(count, matrix.tile_rows)
    whole = count // tile
    top = whole * tile
    np.matmul(
        rows[:top].reshape(1, whole, tile, -1),
        blocks[:, None],
        out=part[:top].reshape(whole, tile, high - low, size).transpose(2, 0, 1, 3),
    )
    if top < count:
        np.matmul(rows[top:], blocks, out=part[top:].swapaxes(0, 1))


def _balanced_tile_rows(count: int, most: int) -> int:
    """Rows a tile, so that tiles are about equal; `most` 0: all."""
    if not most or count <= most:
        return count
    even = -(-count // -(-count // most))
    return min(most, -(-even // TILE_ROW_MULTIPLE) * TILE_ROW_MULTIPLE)
