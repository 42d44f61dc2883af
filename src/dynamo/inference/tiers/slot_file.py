"""`SlotFile`: a preallocated file of slots with self-describing headers, read without page cache.

A slot is a page with its header and the payload, padded to whole pages. A header is valid for one
layout only: checksums are seeded with it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.core.hashing import IDENTITY_BYTES

PAGE_BYTES: Final = 4096
MAGIC: Final = b"DYNKVBLK"
VERSION: Final = 1
_HEADER: Final = Struct(f"<8sHHIQQQ{IDENTITY_BYTES}sQ")
_CHECKSUM: Final = Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM.size
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class SlotHeader(msgspec.Struct, frozen=True):
    """The description of the block in a slot. `checksum` is that of the payload as stored, of
    `length` bytes in `codec`. `generation` increases with each slot that a store writes."""

    block_hash: int
    parent_hash: int
    generation: int
    identity: bytes
    codec: int
    length: int
    checksum: int

    def encode(self, seed: int) -> bytes:
        """Return the header as bytes that `decode` accepts with the same seed."""
        packed = _HEADER.pack(
            *(MAGIC, VERSION, self.codec, self.length, self.block_hash, self.parent_hash),
            *(self.generation, self.identity, self.checksum),
        )
        return packed + _CHECKSUM.pack(xxh3_64_intdigest(packed, seed))

    @classmethod
    def decode(cls, data: bytes | memoryview, seed: int) -> SlotHeader | None:
        """Return the header at the start of `data`, or None if there is no valid one."""
        packed = bytes(data[:HEADER_BYTES])
        if packed[: len(MAGIC)] != MAGIC or len(packed) < HEADER_BYTES:
            return None
        magic, version, codec, length, block, parent, generation, identity, checksum = (
            _HEADER.unpack_from(packed)
        )
        (own_checksum,) = _CHECKSUM.unpack_from(packed, _HEADER.size)
        del magic
        if version != VERSION or own_checksum != xxh3_64_intdigest(packed[: _HEADER.size], seed):
            return None
        return cls(block, parent, generation, identity, codec, length, checksum)


class SlotFile:
    """Reads and writes slots with room for `payload_bytes` each, from any thread.

    Reads and writes bypass the page cache where the file system can do that. They go to buffers of
    whole pages directly, else through a buffer of this object.
    """

    def __init__(self, path: Path, payload_bytes: int) -> None:
        """Open or create the file. Raises OSError."""
        self.payload_bytes = payload_bytes
        self.slot_bytes = PAGE_BYTES + pad_to_pages(payload_bytes)
        self.is_direct = False
        self._buffers: list[memoryview] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)
        try:
            os.fchmod(self.fd, 0o600)
            with suppress(OSError):
                self._bypass_page_cache(path)
            if not self.is_direct:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            os.close(self.fd)
            raise

    def _bypass_page_cache(self, path: Path) -> None:
        """Open the file again, without page cache. Raises OSError if the file system cannot."""
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(direct, [page], 0)
        except BaseException:
            os.close(direct)
            raise
        os.close(self.fd)
        self.fd, self.is_direct = direct, True

    def reserve(self, slots: int) -> None:
        """Reserve the disk space of `slots` slots, and release what is beyond. Raises OSError and
        reserves nothing if there is too little."""
        size, state, volume = slots * self.slot_bytes, os.fstat(self.fd), os.fstatvfs(self.fd)
        if size - state.st_blocks * 512 > volume.f_bavail * volume.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self.fd, size)
        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if fallocate is None or not fallocate(self.fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            os.ftruncate(self.fd, min(size, state.st_size))  # a part may be reserved
            raise OSError(number, os.strerror(number))

    def read(self, slot: int, payload: memoryview) -> bytes:
        """Read a slot and return its header page. `payload` has room for whole pages and is aligned
        to pages, or it is a slice of a buffer of `buffer()`. Raises OSError."""
        start, wanted = slot * self.slot_bytes, PAGE_BYTES + len(payload)
        try:
            with self.buffer() as page:
                count = os.preadv(self.fd, [page[:PAGE_BYTES], payload], start)
                if count < wanted:
                    raise OSError(errno.EIO, f"{count} of {wanted} bytes are in the file")
                return bytes(page[:HEADER_BYTES])
        finally:
            if not self.is_direct:
                os.posix_fadvise(self.fd, start, self.slot_bytes, os.POSIX_FADV_DONTNEED)

    def read_header(self, slot: int) -> bytes:
        """Read the header of a slot. The result is shorter at the end of the file. Raises
        OSError."""
        with self.buffer() as page:
            count = os.preadv(self.fd, [page[:PAGE_BYTES]], slot * self.slot_bytes)
            return bytes(page[: min(count, HEADER_BYTES)])

    def write(self, slot: int, header: bytes, payload: memoryview) -> None:
        """Write a slot. `payload` is aligned as in `read`. Raises OSError."""
        start, wanted = slot * self.slot_bytes, PAGE_BYTES + len(payload)
        with self.buffer() as page:
            page[: len(header)] = header
            count = os.pwritev(self.fd, [page[:PAGE_BYTES], payload], start)
            if count < wanted:
                raise OSError(errno.ENOSPC, f"{count} of {wanted} bytes were written")

    @contextmanager
    def buffer(self) -> Iterator[memoryview]:
        """Lend a buffer for a slot: a page for the header, and the pages of the payload."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, self.slot_bytes))
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)

    def close(self) -> None:
        """Close the file. No read or write may be in progress."""
        os.close(self.fd)
        self._buffers.clear()


def pad_to_pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
