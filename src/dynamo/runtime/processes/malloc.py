"""The C library's heap, in processes whose large blocks come and go with requests."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD_BYTES = 128 << 10


def tune_malloc() -> None:
    """Large blocks go back to the system when freed, and threads share one heap beside the loop's:
    6 MB less in a frontend. glibc would raise its idea of "large" to 32 MB by itself, which suits
    engines, whose arrays are made anew every step. Does nothing where the library has no such way.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_ARENA_MAX, 2)
