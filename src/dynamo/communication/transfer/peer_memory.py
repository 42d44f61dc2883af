"""The memory of a peer on this host, mapped from its memfd to read from."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from functools import cache
from threading import Event
from typing import Final

from dynamo.communication.transfer.region import CopyShared, MemoryRegion, SlotRead, memory_offset
from dynamo.core.errors import TransferFailed

COPY_THREADS: Final = max(1, min(4, os.cpu_count() or 1))
"""Threads of a pull: one core copies a tenth of what the memory of a server can deliver. A device
copies by itself."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *(ctypes.c_int,) * 3,
        ctypes.c_ssize_t,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class PeerMemory:
    """A read-only mapping of a `MemoryRegion` of another process.

    The mapping keeps the memory of a dead process. `close` gives it back when the last copy ends.
    """

    def __init__(
        self, fd: int, slots: int, slot_bytes: int, copy_shared: CopyShared | None = None
    ) -> None:
        """Map `fd`, which stays open. Raises `OSError`, and `TransferFailed` if its size may change
        or is wrong: a copy would end this process. `copy_shared`: the slots are not in `fd`, only
        their generations."""
        self._size = memory_offset(slots) + (0 if copy_shared else slots * slot_bytes)
        self._copy_shared = copy_shared
        self.copy_threads = 1 if copy_shared else COPY_THREADS
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < self._size:
            raise TransferFailed.of("refused", "the peer's memory is unsealed or too small")
        address = _libc().mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address: int = address
        self._slots_address = self._address + memory_offset(slots)
        self._generations = (ctypes.c_uint64 * slots).from_address(self._address)
        self._copies = 0
        self._closed = False

    def begin(self) -> None:
        """Keep the mapping for a copy. Raises `TransferFailed` if it is closed. On the loop."""
        if self._closed:
            raise TransferFailed.of("gone", "the peer's process has ended")
        self._copies += 1

    def end(self) -> None:
        """End what `begin` began."""
        self._copies -= 1
        self._unmap_if_unused()

    def close(self) -> None:
        """Unmap when no copy runs."""
        self._closed = True
        self._unmap_if_unused()

    def _unmap_if_unused(self) -> None:
        if self._closed and not self._copies and self._address:
            _libc().munmap(self._address, self._size)
            self._address, self._copy_shared = 0, None

    def copy(self, region: MemoryRegion, reads: Sequence[SlotRead], stop: Event) -> None:
        """Copy slots into `region`, in a thread. Returns early when `stop` is set.

        Raises `TransferFailed` if a generation is not as expected before or after the copies.
        """
        sources = [read.source for read in reads]
        targets = [read.target for read in reads]
        self._check(reads)
        if self._copy_shared is None:
            region.copy_from(self._slots_address, sources, targets, stop)
        elif not stop.is_set():
            self._copy_shared(region, sources, targets)
        self._check(reads)

    def _check(self, reads: Sequence[SlotRead]) -> None:
        for read in reads:
            if self._generations[read.source] != read.generation:
                text = f"the peer uses block {read.source} for something else now"
                raise TransferFailed.of("stale", text)
