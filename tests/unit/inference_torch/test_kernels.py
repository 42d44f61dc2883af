"""Every kernel against its reference, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.inference_native.test_shapes import CASES, random_prompts, write_model
from tests.unit.inference_torch.test_torch_shapes import BlockHarness

from dynamo.inference.model_runner import StepChunk

torch = pytest.importorskip("torch", reason="make test-torch installs PyTorch")
pytest.importorskip("triton", reason="make test-torch installs Triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # the interpreter's exp
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.timeout(480),  # a busy machine
]

SEQUENCES = {
    "one token": [(0, 1)],
    "decode at the edges of blocks": [(15, 1), (16, 1), (17, 1), (130, 1)],
    "a prompt": [(0, 37)],
    "chunks after cached prefixes": [(16, 16), (48, 5), (3, 70)],
    "both": [(40, 9), (99, 1), (0, 2), (0, 1), (64, 1)],
}
"""(positions before the step, positions of the step) of each sequence."""
SHAPES = [(4, 4, 64), (4, 2, 80), (8, 2, 128), (8, 1, 64), (6, 2, 16)]
"""(query heads, kv heads, head_dim)"""
BLOCK_TOKENS = 16


def make_case(shape: tuple[int, int, int], sequences: list[tuple[int, int]]) -> Any:
    """Return a batch and blocks of NaN, of which those before the step's positions are filled."""
    from dynamo.inference.torch.batch import make_paged_batch

    _, kv_heads, dim = shape
    blocks = iter(np.random.default_rng(1).permutation(64).tolist())
    kv_blocks = torch.full((64, 3, 2, kv_heads, BLOCK_TOKENS, dim), torch.nan)
    chunks: list[Any] = []
    for start, count in sequences:
        tokens = SimpleNamespace(tokens=np.arange(start + count))
        table = [
            SimpleNamespace(id=next(blocks)) for _ in range(-(-(start + count) // BLOCK_TOKENS))
        ]
        for position in range(start):
            block = table[position // BLOCK_TOKENS].id
            kv_blocks[block, 1, :, :, position % BLOCK_TOKENS] = torch.randn(2, kv_heads, dim)
        chunks.append(StepChunk(tokens, start, count, True, blocks=table))  # type: ignore[arg-type]
    return make_paged_batch(chunks, BLOCK_TOKENS, torch.device("cpu")), kv_blocks[:, 1]


def write_keys(batch: Any, kv_blocks: Any) -> None:
    pairs = torch.randn(len(batch.slots), 2, kv_blocks.shape[2], kv_blocks.shape[4])
    kv_blocks[batch.slots // BLOCK_TOKENS, :, :, batch.slots % BLOCK_TOKENS] = pairs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 5.0)])
def test_attention(
    shape: tuple[int, int, int], sequences: list[tuple[int, int]], window: int, softcap: float
) -> None:
    from dynamo.inference.torch import kernels
    from dynamo.inference.torch.attention import attend_blocks

    torch.manual_seed(3)
    batch, kv_blocks = make_case(shape, sequences)
    write_keys(batch, kv_blocks)
    queries = torch.randn(len(batch.token_ids), shape[0], shape[2]) / shape[2] ** 0.5
    tiles = kernels.make_prefill_tiles(batch, shape[0] // shape[1])
    expected = attend_blocks(queries, kv_blocks, batch, window, softcap)
    actual = kernels.attend(queries, kv_blocks, batch, tiles, window, softcap)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_half_precision(shape: tuple[int, int, int]) -> None:
    """Softmax and sums are float32. Weights are rounded before they are multiplied: 2e-3. The
    interpreter cannot multiply bfloat16."""
    from dynamo.inference.torch import kernels
    from dynamo.inference.torch.attention import attend_blocks

    torch.manual_seed(5)
    batch, kv_blocks = make_case(shape, SEQUENCES["both"])
    write_keys(batch, kv_blocks)
    kv_blocks = kv_blocks.half()
    queries = (torch.randn(len(batch.token_ids), shape[0], shape[2]) / shape[2] ** 0.5).half()
    tiles = kernels.make_prefill_tiles(batch, shape[0] // shape[1])
    expected = attend_blocks(queries, kv_blocks, batch)
    actual = kernels.attend(queries, kv_blocks, batch, tiles)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", ["plain", "rotated", "in part", "normed"])
def test_rotation_and_cache_write(shape: tuple[int, int, int], case: str) -> None:
    from dynamo.inference.torch import kernels
    from dynamo.inference.torch.attention import rotate_rows

    torch.manual_seed(4)
    heads, kv_heads, dim = shape
    batch, kv_blocks = make_case(shape, SEQUENCES["both"])
    qkv = torch.randn(len(batch.token_ids), (heads + 2 * kv_heads) * dim)
    angles = torch.randn(len(qkv), dim // 4 if case == "in part" else dim // 2)
    rotation = None if case == "plain" else (torch.cos(angles), torch.sin(angles))
    factors = torch.rand(heads + kv_heads, dim) if case == "normed" else None
    actual_blocks = kv_blocks.clone()
    actual = kernels.rotate(
        qkv, actual_blocks, batch.slots, heads, rotation=rotation, factors=factors, eps=1e-5
    )
    if factors is not None:
        parts = qkv.view(len(qkv), -1, dim).clone()
        normed = torch.nn.functional.rms_norm(parts[:, : heads + kv_heads], (dim,), eps=1e-5)
        parts[:, : heads + kv_heads] = normed * factors
        qkv = parts.flatten(1)
    expected = rotate_rows(qkv, kv_blocks, batch.slots, heads, rotation)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_blocks, kv_blocks, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [(0, 48), (1, 1025), (5, 96)], ids=str)
def test_gated_mlp(activation: str, size: tuple[int, int]) -> None:
    from dynamo.inference.torch import backend, kernels

    gate_up = torch.randn(size[0], 2 * size[1]) * 4
    actual = kernels.gate_rows(gate_up, activation)
    torch.testing.assert_close(actual, backend.gate_rows(gate_up, activation))


def test_a_model_with_all_kernels(tmp_path: Path) -> None:
    """Gemma 3 has windows, norms of queries and keys, and two rotary embeddings."""
    name = "gemma3"
    harness: Any = BlockHarness(write_model(tmp_path, CASES[name]))
    prompt = random_prompts(name)[2]
    expected = harness.step((0, 0, prompt[:9])), harness.step((0, 9, prompt[9:10]))
    harness.backend.attention.uses_kernels = True
    actual = harness.step((1, 0, prompt[:9])), harness.step((1, 9, prompt[9:10]))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)
