"""Weights go from their file to the device in pieces, and are kept in the format of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.models.checkpoint.quantization import BF16, F16, F32, Q8_0, read_values, widen

torch = pytest.importorskip("torch", reason="make test-torch installs PyTorch")

ROWS, WIDTH = 37, 32


def stored_matrix(kind: int) -> Any:
    """Return random finite numbers as a file of this type has them."""
    rng = np.random.default_rng(kind)
    floats = rng.normal(0, 1, (ROWS, WIDTH)).astype(np.float32)
    raw = {
        F32: floats.tobytes(),
        F16: floats.astype(np.float16).tobytes(),
        BF16: (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        Q8_0: b"\x00\x3c" * 17 * ROWS,
    }[kind]
    return read_values(kind, np.frombuffer(raw, np.uint8)).reshape(ROWS, WIDTH)


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pieces_are_converted_once(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: int, dtype: str
) -> None:
    from tests.unit.inference_torch.test_torch_shapes import BlockHarness

    from dynamo.inference.torch import backend as module

    backend: Any = BlockHarness(tiny_llama).backend
    monkeypatch.setattr(backend, "_dtype", getattr(torch, dtype))
    monkeypatch.setattr(module, "PIECE_BYTES", 5 * 2 * WIDTH)
    values = stored_matrix(kind)
    expected = torch.from_numpy(widen(values).copy())
    loaded = backend.load(values)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    joined = backend.prepare_matrix(values, loaded * 2).weight
    assert joined.dtype == getattr(torch, dtype)
    assert joined.equal(torch.cat((expected, expected * 2)).to(joined.dtype))
