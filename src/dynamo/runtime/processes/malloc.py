"""Malloc settings for processes that allocate large blocks per request."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD_BYTES = 128 << 10


def tune_malloc() -> None:
    """Return freed large blocks to the system, and share one heap among all threads but the loop's.
    A frontend uses 6 MB less. By default glibc raises its threshold of "large" to 32 MB, which
    suits engines: they allocate new arrays in every step. Does nothing without `mallopt`."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_ARENA_MAX, 2)
