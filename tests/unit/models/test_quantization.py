"""Dequantization, compared with ggml's reference value by value."""

import struct
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.quantization import block_layout, dequantize


def half(raw: bytes) -> np.float32:
    return np.float32(struct.unpack_from("<e", raw)[0])


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
    20: lambda b, j: half(b[:2]) * np.float32(IQ4[nibble(b[2:], j)]),
}


def scale_min_k4(j: int, q: bytes) -> tuple[int, int]:
    """ggml's get_scale_min_k4: the 6-bit scale and minimum of 32 values."""
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def q2_k(b: bytes) -> Iterator[np.float32]:
    scales, qs = b[:16], b[16:80]
    for n in range(256):
        scale, shift = scales[n // 16], n % 128 // 32 * 2
        value = qs[n // 128 * 32 + n % 32] >> shift & 3
        yield half(b[80:82]) * np.float32(scale & 15) * np.float32(value) - half(
            b[82:84]
        ) * np.float32(scale >> 4)


def q3_k(b: bytes) -> Iterator[np.float32]:
    mask, qs, packed = b[:32], b[32:96], b[96:108]
    for n in range(256):
        run = n // 16
        low = packed[run % 8] >> 4 * (run // 8) & 15
        scale = (low | (packed[8 + run % 4] >> 2 * (run // 4) & 3) << 4) - 32
        value = qs[n // 128 * 32 + n % 32] >> n % 128 // 32 * 2 & 3
        value -= 0 if mask[n % 32] >> n // 32 & 1 else 4
        yield half(b[108:110]) * np.float32(scale) * np.float32(value)


def q4_k(b: bytes) -> Iterator[np.float32]:
    for n in range(256):
        scale, low = scale_min_k4(n // 32, b[4:16])
        value = b[16 + n // 64 * 32 + n % 32] >> n % 64 // 32 * 4 & 15
        yield half(b) * np.float32(scale) * np.float32(value) - half(b[2:]) * np.float32(low)


def q5_k(b: bytes) -> Iterator[np.float32]:
    for n in range(256):
        scale, low = scale_min_k4(n // 32, b[4:16])
        value = b[48 + n // 64 * 32 + n % 32] >> n % 64 // 32 * 4 & 15
        value += (b[16 + n % 32] >> n // 32 & 1) << 4
        yield half(b) * np.float32(scale) * np.float32(value) - half(b[2:]) * np.float32(low)


def q6_k(b: bytes) -> Iterator[np.float32]:
    for n in range(256):
        part, rest = divmod(n, 128)
        low = b[part * 64 + rest % 64] >> rest // 64 * 4 & 15
        high = b[128 + part * 32 + rest % 32] >> rest // 32 * 2 & 3
        (scale,) = struct.unpack_from("<b", b, 192 + n // 16)
        yield half(b[208:210]) * np.float32(scale) * np.float32((low | high << 4) - 32)


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_xs(b: bytes) -> Iterator[np.float32]:
    (high,) = struct.unpack_from("<H", b, 2)
    for n in range(256):
        run = n // 32
        scale = (b[4 + run // 2] >> run % 2 * 4 & 15 | (high >> 2 * run & 3) << 4) - 32
        value = IQ4[b[8 + run * 16 + n % 16] >> n % 32 // 16 * 4 & 15]
        yield half(b) * np.float32(scale) * np.float32(value)


SUPER_BLOCKS = {10: q2_k, 11: q3_k, 12: q4_k, 13: q5_k, 14: q6_k, 23: iq4_xs}
HALVES = {10: (80, 82), 11: (108,), 14: (208,)}
"""Offsets of half-precision numbers in a block, where these are not its first two."""


def block(kind: int, chance: Random) -> bytes:
    raw = bytearray(chance.randbytes(block_layout(kind)[1]))
    for at in HALVES.get(kind, (0, 2)):
        struct.pack_into("<e", raw, at, chance.uniform(-2, 2))
    return bytes(raw)


@pytest.mark.parametrize("kind", sorted(REFERENCE))
def test_blocks_have_the_reference_values(kind):
    chance = Random(kind)
    blocks = [block(kind, chance) for _ in range(40)]
    expected = [REFERENCE[kind](raw, j) for raw in blocks for j in range(32)]
    result = dequantize(kind, np.frombuffer(b"".join(blocks), np.uint8))
    assert result.dtype == np.float32
    assert np.array_equal(result, np.array(expected, np.float32))


@pytest.mark.parametrize("kind", sorted(SUPER_BLOCKS))
def test_super_blocks_have_the_reference_values(kind):
    chance = Random(kind)
    blocks = [block(kind, chance) for _ in range(20)]
    expected = [value for raw in blocks for value in SUPER_BLOCKS[kind](raw)]
    result = dequantize(kind, np.frombuffer(b"".join(blocks), np.uint8))
    assert np.array_equal(result, np.array(expected, np.float32))


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
