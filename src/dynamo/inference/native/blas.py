"""The threads of the OpenBLAS that NumPy carries. Set by a call: the environment is not ours to
write, and is read before we come."""

from __future__ import annotations

import ctypes
from pathlib import Path

NAMES = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def set_threads(threads: int) -> bool:
    """Use so many threads for matrix products; False: this NumPy has another BLAS."""
    import numpy as np

    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))
            for name in NAMES:
                function = getattr(library, name, None)
                if function is not None:
                    function(ctypes.c_int(threads))
                    return True
    return False
