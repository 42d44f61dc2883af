"""The OpenBLAS that NumPy carries: its threads, and which of its kernels this processor gets.

Set by calls: the environment is not ours to write, and is read before we come.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

SYMBOL_AFFIXES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("openblas_", ""))
CORES_WITH_SMALL_KERNELS = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})
SMALL_KERNEL_MULTIPLICATIONS = 1_000_000
"""Products of at most so many multiplications run in kernels that pack nothing, on processors with
such kernels (AVX-512). Source: OpenBLAS, sgemm_small_kernel_permit."""


def set_blas_threads(threads: int) -> bool:
    """Use so many threads for one product; False: this NumPy has another BLAS."""
    function = _find_function("set_num_threads")
    if function is None:
        return False
    function(ctypes.c_int(threads))
    return True


def has_small_kernels() -> bool:
    """Whether small products are fast here without packing."""
    function = _find_function("get_corename")
    if function is None:
        return False
    function.restype = ctypes.c_char_p
    return function().decode() in CORES_WITH_SMALL_KERNELS


def _find_function(name: str) -> Any:
    for library in _load_libraries():
        for before, after in SYMBOL_AFFIXES:
            function = getattr(library, f"{before}{name}{after}", None)
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
