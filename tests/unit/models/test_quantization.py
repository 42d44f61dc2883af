"""Dequantization, compared with llama.cpp's functions value by value."""

import ctypes
import importlib.util
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.quantization import (
    _BLOCK_LAYOUTS,
    BF16,
    F16,
    F32,
    block_layout,
    dequantize,
)

FUNCTIONS = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_K", 11: "q3_K", 12: "q4_K",
    13: "q5_K", 14: "q6_K", 20: "iq4_nl", 23: "iq4_xs",
}  # fmt: skip
"""The types of packed tensors, and llama.cpp's names for them."""
HALVES = {10: (80, 82), 11: (108,), 14: (208,)}
"""Offsets of half-precision numbers in a block, where these are not its first two."""


def block(kind: int, chance: Random) -> bytes:
    raw = bytearray(chance.randbytes(block_layout(kind)[1]))
    for at in HALVES.get(kind, (0, 2)):
        struct.pack_into("<e", raw, at, chance.uniform(-2, 2))
    return bytes(raw)


@pytest.fixture(scope="module")
def llama_cpp() -> ctypes.CDLL:
    """The library of llama.cpp in the package xllamacpp."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None:
        pytest.skip("xllamacpp is not installed")
    (folder,) = spec.submodule_search_locations
    return ctypes.CDLL(str(next(Path(folder).glob("xllamacpp*.so"))))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_values_are_those_of_llama_cpp(kind, llama_cpp):
    """Equal up to a rounding, since its compiler may join a product and a sum."""
    chance = Random(kind)
    raw = b"".join(block(kind, chance) for _ in range(40))
    result = dequantize(kind, np.frombuffer(raw, np.uint8))
    expected = np.empty_like(result)
    read = getattr(llama_cpp, f"dequantize_row_{FUNCTIONS[kind]}")
    read(raw, expected.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(expected)))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_every_packed_type_is_compared():
    assert set(FUNCTIONS) | {F32, F16, BF16} == set(_BLOCK_LAYOUTS)


def test_many_blocks_are_dequantized_in_chunks():
    raw = block(3, Random(0))
    result = dequantize(3, np.frombuffer(raw * 80_000, np.uint8)).reshape(-1, 32)
    assert (result == result[0]).all()


def test_bfloat16_is_widened():
    values = np.array([1.0, -2.5, 3e38, 0.0], np.float32)
    raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    result = dequantize(30, np.frombuffer(raw, np.uint8))
    assert np.allclose(result, values, rtol=1e-2)
    assert result[:2].tolist() == [1.0, -2.5]


def test_the_result_is_a_copy():
    raw = bytearray(np.ones(4, np.float32).tobytes())
    result = dequantize(0, np.frombuffer(raw, np.uint8))
    raw[:] = bytes(16)
    assert result.tolist() == [1.0] * 4


def test_unsupported_types_are_refused():
    with pytest.raises(ModelUnavailable, match="IQ2_XS"):
        block_layout(17)
