"""Malloc settings: freed large blocks return to the system."""

from __future__ import annotations

import subprocess
import sys

BLOCK = 1 << 20
PROGRAM = f"""
import ctypes
from pathlib import Path
from dynamo.runtime.processes.process import tune_malloc

def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
tune_malloc()
before = resident_bytes()
for _ in range(3):  # after this, glibc would keep blocks of this size by default
    blocks = [libc.malloc({BLOCK}) for _ in range(64)]
    for block in blocks:
        ctypes.memset(block, 1, {BLOCK})
    for block in blocks[:-1]:
        libc.free(block)
print(resident_bytes() - before)
"""


def test_freed_large_blocks_return_to_the_system() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True
    )
    assert int(finished.stdout) < 16 * BLOCK
