"""Buffers that are used again, step after step."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]


class ScratchBuffers:
    """Float32 buffers by name; each grows to the largest shape asked for."""

    def __init__(self) -> None:
        self._buffers: dict[str, Floats] = {}

    def __call__(self, name: str, *shape: int) -> Floats:
        """A contiguous array of this shape; what it held under the same name is lost."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)

    def clear(self) -> None:
        """Let go of all."""
        self._buffers.clear()
