"""Dequantization of GGML block formats to float32. Source: the layouts in ggml's `ggml-quants`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import ModelUnavailable

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Stored = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = 10, 11, 12, 13, 14, 20, 23
_BLOCK_LAYOUTS = {
    F32: (1, 4), F16: (1, 2), BF16: (1, 2),
    Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34),
    Q2_K: (256, 84), Q3_K: (256, 110), Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210),
    IQ4_NL: (32, 18), IQ4_XS: (256, 136),
}  # fmt: skip
_PLAIN_TYPES = {F32: "<f4", F16: "<f2", BF16: "<u2"}
_UNSUPPORTED_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_CHUNK_VALUES = 1 << 20
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the 16 codes of IQ4_NL and IQ4_XS."""


def block_layout(kind: int) -> tuple[int, int]:
    """Return (values, bytes) of a block. Raises `ModelUnavailable` for an unsupported type."""
    layout = _BLOCK_LAYOUTS.get(kind)
    if layout is None:
        raise ModelUnavailable(
            f"tensors of type {_UNSUPPORTED_NAMES.get(kind, kind)} are not supported",
            hint="use a file in F32, F16, BF16, Q8_0, Q4_0 to Q5_1, Q2_K to Q6_K, IQ4_NL or IQ4_XS",
        )
    return layout


def dequantize(kind: int, raw: Bytes) -> Floats:
    """Dequantize whole blocks to a new flat float32 array. `kind` must pass `block_layout`."""
    return copy_floats(read_values(kind, raw))


def read_values(kind: int, raw: Bytes) -> Stored:
    """Return the values of whole blocks: packed ones as a new flat float32 array, others as a view
    that cannot be written: float32, float16, or bfloat16 as uint16."""
    import numpy as np

    per_block, block_bytes = block_layout(kind)
    if kind in _PLAIN_TYPES:
        plain = raw.view(_PLAIN_TYPES[kind])
        plain.flags.writeable = False
        return plain
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), per_block), np.float32)
    read = _READERS.get(kind, partial(_read_legacy_blocks, kind))
    step = _CHUNK_VALUES // per_block
    for start in range(0, len(blocks), step):  # chunks that fit the CPU cache
        chunk = slice(start, start + step)
        read(blocks[chunk], out[chunk])
    return out.reshape(-1)


def widen(values: Stored) -> Floats:
    """Return values of `read_values` as float32. Float32 values are not copied."""
    import numpy as np

    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    wide = values.astype("u4")  # bfloat16 is the upper half of a float32
    wide <<= 16
    return wide.view("f4")


def copy_floats(values: Stored) -> Floats:
    """Return values of `read_values` as float32 that may be changed."""
    import numpy as np

    return np.require(widen(values), requirements="W")


def _read_scales(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view("<f2").astype("f4")


def _read_legacy_blocks(kind: int, blocks: Bytes, out: Floats) -> None:
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


def _unpack_bits(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack fields of `bits` bits: from each `run` bytes first the lowest field of every byte,
    then the next one. Returns [blocks, values]."""
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _scale_runs(out: Floats, values: Any, scales: Floats, minima: Floats | None = None) -> None:
    """Write values [blocks, values] times the scales [blocks, runs] of their runs, less minima."""
    import numpy as np

    runs = (*scales.shape, -1)
    np.multiply(values.reshape(runs), scales[..., None], out=out.reshape(runs))
    if minima is not None:
        out.reshape(runs)[...] -= minima[..., None]


def _read_q2_k(blocks: Bytes, out: Floats) -> None:
    scales = blocks[:, :16]
    _scale_runs(
        out,
        _unpack_bits(blocks[:, 16:80], 2, 32),
        _read_scales(blocks, 80) * (scales & 0x0F),
        _read_scales(blocks, 82) * (scales >> 4),
    )


def _read_q3_k(blocks: Bytes, out: Floats) -> None:
    import numpy as np

    low, high = _unpack_bits(blocks[:, 96:104], 4, 8), _unpack_bits(blocks[:, 104:108], 2, 4)
    scales = (low | high << 4).astype(np.int8) - 32
    values = _unpack_bits(blocks[:, 32:96], 2, 32).astype(np.int8)
    values -= (_unpack_bits(blocks[:, :32], 1, 32) ^ 1).astype(np.int8) << 2
    _scale_runs(out, values, _read_scales(blocks, 108) * scales)


def _read_q4_k(blocks: Bytes, out: Floats) -> None:
    _scale_runs(out, _unpack_bits(blocks[:, 16:], 4, 32), *_read_k_scales(blocks))


def _read_q5_k(blocks: Bytes, out: Floats) -> None:
    values = _unpack_bits(blocks[:, 48:], 4, 32) | _unpack_bits(blocks[:, 16:48], 1, 32) << 4
    _scale_runs(out, values, *_read_k_scales(blocks))


def _read_k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Read the scales and minima of Q4_K and Q5_K: 8 of each, of 6 bits in 12 bytes."""
    import numpy as np

    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 0x3F, high & 0x0F | low >> 2 & 0x30), axis=1)
    minima = np.concatenate((middle & 0x3F, high >> 4 | middle >> 2 & 0x30), axis=1)
    return _read_scales(blocks, 0) * scales, _read_scales(blocks, 2) * minima


def _read_q6_k(blocks: Bytes, out: Floats) -> None:
    import numpy as np

    values = _unpack_bits(blocks[:, :128], 4, 64) | _unpack_bits(blocks[:, 128:192], 2, 32) << 4
    scales = _read_scales(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scale_runs(out, values.astype(np.int8) - 32, scales)


def _read_iq4_nl(blocks: Bytes, out: Floats) -> None:
    import numpy as np

    codes = np.array(_IQ4_VALUES, np.int8)
    _scale_runs(out, codes[_unpack_bits(blocks[:, 2:], 4, 16)], _read_scales(blocks, 0))


def _read_iq4_xs(blocks: Bytes, out: Floats) -> None:
    import numpy as np

    codes = np.array(_IQ4_VALUES, np.int8)
    low, high = _unpack_bits(blocks[:, 4:8], 4, 1), _unpack_bits(blocks[:, 2:4], 2, 1)
    scales = (low | high << 4).astype(np.int8) - 32
    values = codes[_unpack_bits(blocks[:, 8:], 4, 16)]
    _scale_runs(out, values, _read_scales(blocks, 0) * scales)


_READERS: Mapping[int, Callable[[Bytes, Floats], None]] = {
    Q2_K: _read_q2_k,
    Q3_K: _read_q3_k,
    Q4_K: _read_q4_k,
    Q5_K: _read_q5_k,
    Q6_K: _read_q6_k,
    IQ4_NL: _read_iq4_nl,
    IQ4_XS: _read_iq4_xs,
}
"""Functions that dequantize blocks [blocks, bytes] into float32 [blocks, values], by type."""
