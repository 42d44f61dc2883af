"""Products in blocks and tiles against NumPy's own, on kernels of both kinds."""

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


def random(*shape: int) -> Any:
    return rng.normal(0, 0.3, shape).astype(np.float32)


@pytest.fixture(params=[1, 2, 3])
def crew(request: Any) -> Iterator[ThreadPool]:
    one = ThreadPool(request.param)
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def every_hand_over_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_matmul, "MIN_WEIGHTS_PER_THREAD", 1)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("count", [1, 2, 31, 33, 100])
@pytest.mark.parametrize("widths", [(64,), (40, 7, 3), (5,), (96, 33)])
def test_blocks_and_tiles_are_the_whole(
    crew: ThreadPool, small: bool, count: int, widths: tuple[int, ...]
) -> None:
    parts = tuple(random(width, 50) for width in widths)
    matrix = make_blocked_matrix(parts, crew.threads, small, Arena())
    rows, out = random(count, 50), np.full((count, matrix.padded_width), np.nan, np.float32)
    matmul(rows, matrix, out, crew)
    want = rows @ np.concatenate(parts).T
    np.testing.assert_allclose(out[:, : matrix.width], want, atol=1e-5)
    assert not out[:, matrix.width :].any()
    ids = np.array([0, matrix.width - 1])
    assert (matrix.columns(ids) == np.concatenate(parts)[ids]).all()


def test_what_is_too_deep_for_small_kernels_gets_one_block_a_thread() -> None:
    deep = make_blocked_matrix((random(64, 5_000),), 2, True, Arena())
    assert deep.blocks.shape == (2, 5_000, 32)
    assert deep.tile_rows == 0
    assert make_blocked_matrix((random(64, 50),), 2, True, Arena()).blocks.shape == (2, 50, 32)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("inner", [96, 70, 20])
@pytest.mark.parametrize("count", [1, 40])
def test_pieces_of_a_gated_mlp_are_the_whole(
    crew: ThreadPool, small: bool, inner: int, count: int
) -> None:
    gate, up, down = random(inner, 48), random(inner, 48), random(48, inner)
    rows, total = random(count, 48), random(count, 48)
    gated = rows @ gate.T
    want = total + (gated / (1 + np.exp(-gated)) * (rows @ up.T)) @ down.T
    pieces = shard_mlp(gate, up, down, crew.threads, small, Arena())
    add_gated_mlp(total, rows, pieces, ScratchBuffers(), crew)
    np.testing.assert_allclose(total, want, atol=1e-5)


def test_an_arena_hands_out_lines_of_their_own() -> None:
    empty = Arena()
    found = [empty(3, 5), empty(16), empty(SLAB_FLOATS), empty(2, 1)]
    for number, array in enumerate(found):
        array[...] = number
    assert [int(array.reshape(-1)[-1]) for array in found] == [0, 1, 2, 3]
    assert all(array.ctypes.data % 64 == 0 for array in found if array.size < SLAB_FLOATS)
