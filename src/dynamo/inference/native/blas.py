"""The OpenBLAS inside NumPy: its number of threads and its small kernels.

Settings are made by calls, because the environment variables are read before this code runs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

SYMBOL_AFFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("openblas_", ""))
CORES_WITH_SMALL_KERNELS = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})
SMALL_KERNEL_MULTIPLICATIONS = 1_000_000
"""Products with at most this many multiplications run in kernels that do not pack.

Only processors with AVX-512 have such kernels. Source: OpenBLAS, sgemm_small_kernel_permit.
"""


def set_blas_threads(threads: int) -> bool:
    """Set the number of threads for one product. Returns False if NumPy uses another BLAS."""
    function = _find_function("set_num_threads")
    if function is None:
        return False
    function(ctypes.c_int(threads))
    return True


def has_small_kernels() -> bool:
    """Whether this processor multiplies small matrices without packing."""
    function = _find_function("get_corename")
    if function is None:
        return False
    function.restype = ctypes.c_char_p
    return function().decode() in CORES_WITH_SMALL_KERNELS


def _find_function(name: str) -> Any:
    for library in _load_libraries():
        for prefix, suffix in SYMBOL_AFFIXES:
            function = getattr(library, f"{prefix}{name}{suffix}", None)
            if function is not None:
                return function
    return None


@cache
def _load_libraries() -> list[ctypes.CDLL]:
    import numpy as np

    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs")
    return [
        ctypes.CDLL(str(path)) for folder in folders for path in sorted(folder.glob("*openblas*"))
    ]
