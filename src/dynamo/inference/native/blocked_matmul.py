"""Products of rows and weights, in blocks of columns.

OpenBLAS packs the weights for every product, which costs more than a product of a few rows. Blocks
of 32 columns and tiles of rows are small enough for the kernels that do not pack. These are 2 to 4
times faster at 2 to 16 rows, and 1.1 to 1.7 times above. Processors without such kernels get one
block a thread. A block stays in the L2 cache while the tiles of rows pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dynamo.inference.native.blas import SMALL_KERNEL_MULTIPLICATIONS

if TYPE_CHECKING:
    from dynamo.inference.native.buffers import Arena, Floats
    from dynamo.inference.native.thread_pool import ThreadPool

BLOCK_COLUMNS = 32
TILE_ROW_MULTIPLE = 8
MAX_TILE_ROWS = 32
MIN_MULTIPLICATIONS_PER_THREAD = 4_000_000
MIN_WEIGHTS_PER_THREAD = 600_000
"""A further thread pays off from this much work on (about 50 us)."""


class BlockedMatrix(msgspec.Struct, frozen=True):
    """A linear layer's weights: [block][in][column of the block], zero beyond `width`. `tile_rows`
    is the number of rows in a tile, or 0 for all rows at once. `bias` has the padded width."""

    blocks: Floats
    width: int
    tile_rows: int
    bias: Floats | None = None

    @property
    def padded_width(self) -> int:
        """The number of columns including the padding of the last block."""
        blocks, _, size = self.blocks.shape
        return int(blocks * size)

    def columns(self, ids: Any) -> Floats:
        """Return columns as [ids, in]."""
        size = self.blocks.shape[2]
        columns: Floats = self.blocks[ids // size, :, ids % size]
        return columns


def make_blocked_matrix(
    parts: tuple[Floats, ...],
    threads: int,
    small_kernels: bool,
    arena: Arena,
    bias: Floats | None = None,
) -> BlockedMatrix:
    """Build the matrix from weights [out, in], stacked along out."""
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
    if bias is not None:
        bias = np.pad(bias, (0, blocks.shape[0] * size - width))
    return BlockedMatrix(blocks, width, tile_rows, bias)


def _fill_columns(blocks: Floats, part: Floats, row: int) -> None:
    """Write the rows of `part` as columns, starting with column `row`."""
    size, filled = blocks.shape[2], 0
    while filled < len(part):
        block, column = divmod(row + filled, size)
        count = min(size - column, len(part) - filled, 256)
        blocks[block, :, column : column + count] = part[filled : filled + count].T
        filled += count


def matmul(rows: Floats, matrix: BlockedMatrix, out: Floats, thread_pool: ThreadPool) -> None:
    """Compute out[rows, padded columns] = rows @ matrix, and add the bias."""
    _, depth, size = matrix.blocks.shape
    weights = depth * size
    min_blocks = min(
        MIN_WEIGHTS_PER_THREAD // weights, MIN_MULTIPLICATIONS_PER_THREAD // (weights * len(rows))
    )
    thread_pool.split_rows(
        len(matrix.blocks), max(1, min_blocks), partial(matmul_blocks, rows, matrix, out)
    )
    if matrix.bias is not None:
        out += matrix.bias


def matmul_blocks(
    rows: Floats, matrix: BlockedMatrix, out: Floats, low: int = 0, high: int | None = None
) -> None:
    """Compute the columns of `out` that belong to blocks `low` to `high`, on this thread."""
    blocks, count = matrix.blocks[low:high], len(rows)
    num_blocks, _, size = blocks.shape
    part = out[:, low * size : (low + num_blocks) * size].reshape(count, num_blocks, size)
    if count == 1:
        np.matmul(rows[0], blocks, out=part[0])
        return
    tile = _balanced_tile_rows(count, matrix.tile_rows)
    whole = count // tile
    tiled_rows = whole * tile
    np.matmul(
        rows[:tiled_rows].reshape(1, whole, tile, -1),
        blocks[:, None],
        out=part[:tiled_rows].reshape(whole, tile, num_blocks, size).transpose(2, 0, 1, 3),
    )
    if tiled_rows < count:
        np.matmul(rows[tiled_rows:], blocks, out=part[tiled_rows:].swapaxes(0, 1))


def _balanced_tile_rows(count: int, limit: int) -> int:
    """Return the rows per tile so that tiles are about equal. `limit` 0: one tile."""
    if not limit or count <= limit:
        return count
    even = -(-count // -(-count // limit))
    return min(limit, -(-even // TILE_ROW_MULTIPLE) * TILE_ROW_MULTIPLE)
