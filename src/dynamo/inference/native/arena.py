"""Memory for weights in large pieces: NumPy asks for huge pages only from 4 MiB on, and small ones
cost a tenth of the bandwidth where one row reads all weights."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

SLAB_FLOATS = 16 << 20
ALIGNED_FLOATS = 16


class Arena:
    """Hands out float32 arrays that live as long as any of them."""

    def __init__(self) -> None:
        self._slab: Floats = np.empty(0, np.float32)

    def __call__(self, *shape: int) -> Floats:
        """A C-contiguous array, on a cache line's border; its content is anything."""
        size = prod(shape)
        whole = -(-size // ALIGNED_FLOATS) * ALIGNED_FLOATS
        if whole > SLAB_FLOATS // 4:
            return np.empty(shape, np.float32)
        if whole > self._slab.size:
            self._slab = _allocate_slab(SLAB_FLOATS)
        found, self._slab = self._slab[:size], self._slab[whole:]
        return found.reshape(shape)


def _allocate_slab(size: int) -> Floats:
    slab = np.empty(size + ALIGNED_FLOATS, np.float32)
    skip = -(slab.ctypes.data // slab.itemsize) % ALIGNED_FLOATS
    return slab[skip : skip + size]
