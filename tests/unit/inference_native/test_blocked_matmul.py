"""Products in blocks and tiles against NumPy's own, with and without small kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dynamo.inference.native import blocked_matmul
from dynamo.inference.native.blocked_matmul import make_blocked_matrix, matmul
from dynamo.inference.native.buffers import SLAB_FLOATS, Arena, ScratchBuffers
from dynamo.inference.native.gated_mlp import add_gated_mlp, shard_mlp
from dynamo.inference.native.thread_pool import ThreadPool

rng = np.random.default_rng(5)


def random_matrix(*shape: int) -> Any:
    return rng.normal(0, 0.3, shape).astype(np.float32)


@pytest.fixture(params=[1, 2, 3])
def thread_pool(request: Any) -> Iterator[ThreadPool]:
    pool = ThreadPool(request.param)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def always_use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_matmul, "MIN_WEIGHTS_PER_THREAD", 1)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("count", [1, 2, 31, 33, 100])
@pytest.mark.parametrize("widths", [(64,), (40, 7, 3), (5,), (96, 33)])
def test_blocks_and_tiles_equal_the_whole_product(
    thread_pool: ThreadPool, small: bool, count: int, widths: tuple[int, ...]
) -> None:
    parts = tuple(random_matrix(width, 50) for width in widths)
    matrix = make_blocked_matrix(parts, thread_pool.threads, small, Arena())
    rows, out = random_matrix(count, 50), np.full((count, matrix.padded_width), np.nan, np.float32)
    matmul(rows, matrix, out, thread_pool)
    expected = rows @ np.concatenate(parts).T
    np.testing.assert_allclose(out[:, : matrix.width], expected, atol=1e-5)
    assert not out[:, matrix.width :].any()
    ids = np.array([0, matrix.width - 1])
    assert (matrix.columns(ids) == np.concatenate(parts)[ids]).all()


def test_a_deep_matrix_gets_one_block_a_thread() -> None:
    deep = make_blocked_matrix((random_matrix(64, 5_000),), 2, True, Arena())
    assert deep.blocks.shape == (2, 5_000, 32)
    assert deep.tile_rows == 0
    assert make_blocked_matrix((random_matrix(64, 50),), 2, True, Arena()).blocks.shape == (
        2,
        50,
        32,
    )


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("inner", [96, 70, 20])
@pytest.mark.parametrize("count", [1, 40])
def test_shards_of_a_gated_mlp_equal_the_whole(
    thread_pool: ThreadPool, small: bool, inner: int, count: int
) -> None:
    gate, up, down = random_matrix(inner, 48), random_matrix(inner, 48), random_matrix(48, inner)
    rows, total = random_matrix(count, 48), random_matrix(count, 48)
    gated = rows @ gate.T
    expected = total + (gated / (1 + np.exp(-gated)) * (rows @ up.T)) @ down.T
    shards = shard_mlp(gate, up, down, "silu", thread_pool.threads, small, Arena())
    add_gated_mlp(total, rows, shards, ScratchBuffers(), thread_pool)
    np.testing.assert_allclose(total, expected, atol=1e-5)


def test_an_arena_returns_separate_aligned_arrays() -> None:
    arena = Arena()
    arrays = [arena(3, 5), arena(16), arena(SLAB_FLOATS), arena(2, 1)]
    for number, array in enumerate(arrays):
        array[...] = number
    assert [int(array.reshape(-1)[-1]) for array in arrays] == [0, 1, 2, 3]
    assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size < SLAB_FLOATS)
