"""Dequantization of GGML block formats to float32. Source: the layouts in ggml's `ggml-quants`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.core.errors import ModelUnavailable

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
_BLOCK_LAYOUTS = {
    F32: (1, 4), F16: (1, 2), BF16: (1, 2),
    Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34),
}  # fmt: skip
_UNSUPPORTED_NAMES = {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
_CHUNK_BLOCKS = 1 << 15


def block_layout(kind: int) -> tuple[int, int]:
    """Return (values, bytes) of a block. Raises `ModelUnavailable` for an unsupported type."""
    layout = _BLOCK_LAYOUTS.get(kind)
    if layout is None:
        raise ModelUnavailable(
            f"tensors of type {_UNSUPPORTED_NAMES.get(kind, kind)} are not supported",
            hint="use a file in F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0 or Q4_1",
        )
    return layout


def dequantize(kind: int, raw: Bytes) -> Floats:
    """Dequantize whole blocks to a new flat float32 array. `kind` must pass `block_layout`."""
    import numpy as np

    per_block, block_bytes = block_layout(kind)
    if kind == F32:
        return raw.view("<f4").astype(np.float32)
    if kind == F16:
        return raw.view("<f2").astype(np.float32)
    if kind == BF16:
        return widen_bf16(raw)
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), per_block), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):  # chunks that fit the CPU cache
        chunk = slice(start, start + _CHUNK_BLOCKS)
        _dequantize_blocks(kind, blocks[chunk], out[chunk])
    return out.reshape(-1)


def widen_bf16(raw: Bytes) -> Floats:
    """Convert packed bfloat16, the upper halves of float32 values, to float32."""
    wide = raw.view("<u2").astype("u4")
    wide <<= 16
    return wide.view("f4")


def _read_scales(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view("<f2").astype("f4")


def _dequantize_blocks(kind: int, blocks: Bytes, out: Floats) -> None:
    """Dequantize blocks of a scale, a minimum (Q4_1, Q5_1), fifth bits (Q5), and the values."""
    import numpy as np

    if kind == Q8_0:
        np.multiply(blocks[:, 2:].view(np.int8), _read_scales(blocks, 0), out=out)
        return
    has_minimum, has_fifth_bits = kind in {Q4_1, Q5_1}, kind in {Q5_0, Q5_1}
    at = 4 if has_minimum else 2
    _unpack_nibbles(blocks[:, -16:], out)
    if has_fifth_bits:
        out += _unpack_fifth_bits(blocks[:, at : at + 4])
    if not has_minimum:
        out -= 16 if has_fifth_bits else 8
    out *= _read_scales(blocks, 0)
    if has_minimum:
        out += _read_scales(blocks, 2)


def _unpack_nibbles(packed: Bytes, out: Floats) -> None:
    """Unpack nibbles: the low ones are a block's first 16 values, the high ones its last 16."""
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _unpack_fifth_bits(packed: Bytes) -> Bytes:
    import numpy as np

    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)
