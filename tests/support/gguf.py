"""Writes GGUF files."""

from __future__ import annotations

import struct
from typing import Any


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
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        kind, packed = _gguf_value(value)
        head += _gguf_string(key) + struct.pack("<I", kind) + packed
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _gguf_string(name) + struct.pack("<I", len(shape)) + dims
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return head + b"\0" * (-len(head) % 32) + data
