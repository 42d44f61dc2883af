"""Writes GGUF files, and files with a header and no data."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17),
}  # fmt: skip
"""Number of a GGML type, values and bytes of its blocks."""


def _gguf_value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (
            (4, struct.pack("<I", value))
            if 0 <= value < 1 << 32
            else (11, struct.pack("<q", value))
        )
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _gguf_string(value)
    if all(type(item) is int and abs(item) < 1 << 31 for item in value):
        return 9, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)
    kinds, packed = zip(*(_gguf_value(item) for item in value), strict=True)
    return 9, struct.pack("<IQ", kinds[0], len(value)) + b"".join(packed)


def _gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(
    values: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> bytes:
    """Return a GGUF file. `tensors`: name -> (GGML type, shape with rows first, data)."""
    head = _head(values, len(tensors))
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _gguf_string(name) + struct.pack("<I", len(shape)) + dims
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def _head(values: dict[str, Any], tensors: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values))
    for key, value in values.items():
        kind, packed = _gguf_value(value)
        head += _gguf_string(key) + struct.pack("<I", kind) + packed
    return head


def write_gguf_header(
    path: Path, values: dict[str, Any], tensors: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    """Write a file whose tensors, name -> (type, shape), are a hole. `*` in a name stands for every
    layer."""
    layers = values[f"{values['general.architecture']}.block_count"]
    entries, offset = [], 0
    for pattern, (kind, shape) in tensors.items():
        number, per_block, block_bytes = _TYPES[kind]
        for layer in range(layers if "*" in pattern else 1):
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            name = _gguf_string(pattern.replace("*", str(layer)))
            entries.append(name + dims + struct.pack("<IQ", number, offset))
            offset += -(-prod(shape) // per_block) * block_bytes
    data = _head(values, len(entries)) + b"".join(entries)
    data += b"\0" * (-len(data) % 32)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + offset)
