"""Float32 memory of the NumPy backend: slabs for weights, reusable buffers for results."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

SLAB_FLOATS = 16 << 20
ALIGNED_FLOATS = 16


class Arena:
    """Allocates arrays for weights out of large slabs. A slab lives as long as any of its arrays.
    NumPy asks for huge pages only from 4 MiB on. With small arrays on small pages a forward pass of
    a single row loses a tenth of the memory bandwidth."""

    def __init__(self) -> None:
        self._slab: Floats = np.empty(0, np.float32)

    def __call__(self, *shape: int) -> Floats:
        """Return an uninitialised C-contiguous array that begins at a cache line."""
        size = prod(shape)
        aligned_size = -(-size // ALIGNED_FLOATS) * ALIGNED_FLOATS
        if aligned_size > SLAB_FLOATS // 4:
            return np.empty(shape, np.float32)
        if aligned_size > self._slab.size:
            self._slab = _allocate_slab(SLAB_FLOATS)
        array, self._slab = self._slab[:size], self._slab[aligned_size:]
        return array.reshape(shape)


class ScratchBuffers:
    """Named buffers that are reused in every step. Each grows to the largest shape requested."""

    def __init__(self) -> None:
        self._buffers: dict[str, Floats] = {}

    def __call__(self, name: str, *shape: int) -> Floats:
        """Return a contiguous array of this shape. Earlier arrays of that name are overwritten."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()


def _allocate_slab(size: int) -> Floats:
    slab = np.empty(size + ALIGNED_FLOATS, np.float32)
    skip = -(slab.ctypes.data // slab.itemsize) % ALIGNED_FLOATS
    return slab[skip : skip + size]
