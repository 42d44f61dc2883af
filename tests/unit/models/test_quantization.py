"""Dequantization, compared with ggml's reference value by value."""

import struct
from random import Random

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.quantization import block_layout, dequantize


def half(raw: bytes) -> np.float32:
    return np.float32(struct.unpack("<e", raw)[0])


def nibble(raw: bytes, j: int) -> int:
    return raw[j] & 15 if j < 16 else raw[j - 16] >> 4


def fifth(raw: bytes, j: int) -> int:
    return (struct.unpack("<I", raw)[0] >> j & 1) << 4


REFERENCE = {
    2: lambda b, j: half(b[:2]) * np.float32(nibble(b[2:], j) - 8),
    3: lambda b, j: half(b[:2]) * np.float32(nibble(b[4:], j)) + half(b[2:4]),
    6: lambda b, j: half(b[:2]) * np.float32((nibble(b[6:], j) | fifth(b[2:6], j)) - 16),
    7: lambda b, j: half(b[:2]) * np.float32(nibble(b[8:], j) | fifth(b[4:8], j)) + half(b[2:4]),
    8: lambda b, j: half(b[:2]) * np.float32(struct.unpack("<b", b[2 + j : 3 + j])[0]),
}


def block(kind: int, chance: Random) -> bytes:
    size = block_layout(kind)[1]
    return struct.pack("<ee", chance.uniform(-2, 2), chance.uniform(-2, 2)) + chance.randbytes(
        size - 4
    )


@pytest.mark.parametrize("kind", sorted(REFERENCE))
def test_blocks_have_the_reference_values(kind):
    chance = Random(kind)
    blocks = [block(kind, chance) for _ in range(40)]
    expected = [REFERENCE[kind](raw, j) for raw in blocks for j in range(32)]
    result = dequantize(kind, np.frombuffer(b"".join(blocks), np.uint8))
    assert result.dtype == np.float32
    assert np.array_equal(result, np.array(expected, np.float32))


def test_many_blocks_are_dequantized_in_chunks():
    raw = block(3, Random(0))
    result = dequantize(3, np.frombuffer(raw * 40_000, np.uint8)).reshape(-1, 32)
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
    with pytest.raises(ModelUnavailable, match="Q4_K"):
        block_layout(12)
