"""The C library's heap stays small where it is told to."""

from __future__ import annotations

import subprocess
import sys

BLOCK = 1 << 20
PROGRAM = f"""
import ctypes
from pathlib import Path
from dynamo.runtime.processes.malloc import tune_malloc

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
tune_malloc()
before = resident()
for _ in range(3):  # by then glibc alone would keep blocks of this size
    held = [libc.malloc({BLOCK}) for _ in range(64)]
    for block in held:
        ctypes.memset(block, 1, {BLOCK})
    for block in held[:-1]:
        libc.free(block)
print(resident() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True
    )
    assert int(done.stdout) < 16 * BLOCK
