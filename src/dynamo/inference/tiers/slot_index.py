"""`SlotIndex`: the append-only list of the blocks in a `SlotFile`, for a quick start.

The index is a hint: what is in a slot counts. A record that does not match its checksum is skipped,
and a torn record at the end is cut off.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final

MAGIC: Final = b"DYNKVIDX"
_HEAD: Final = Struct("<8sIIQ8x")
_RECORD: Final = Struct("<IQQQ")
_CRC: Final = Struct("<I")
RECORD_BYTES: Final = _RECORD.size + _CRC.size
HEAD_BYTES: Final = _HEAD.size
VERSION: Final = 1
SPARE_RECORDS: Final = 4096
"""A file with fewer dead records is not rewritten."""

IndexRecord = tuple[int, int, int, int]
"""Slot, hash, parent hash, generation."""


class SlotIndex:
    """An index, written by one process. `records` counts those in the file, dead ones too."""

    def __init__(self, path: Path, slot_bytes: int, seed: int) -> None:
        """`seed` and `slot_bytes` belong to the layout of the blocks. Raises OSError."""
        self._path = path
        self._head = _HEAD.pack(MAGIC, VERSION, slot_bytes, seed)
        self._seed = seed & 0xFFFFFFFF
        self._fd = self._open(path)
        self.records = 0

    def read(self) -> list[IndexRecord] | None:
        """Return the live records in the order in which they were written. None: this is not the
        index of such blocks, or it is new; it is empty now. Raises OSError."""
        data = memoryview(self._read_all())
        if bytes(data[:HEAD_BYTES]) != self._head:
            self._reset(self._fd)
            return None
        end = HEAD_BYTES + (len(data) - HEAD_BYTES) // RECORD_BYTES * RECORD_BYTES
        if end < len(data):
            os.ftruncate(self._fd, end)
        self.records = (end - HEAD_BYTES) // RECORD_BYTES
        return _live_records(self._valid_records(data[HEAD_BYTES:end]))

    def append(self, records: Sequence[IndexRecord]) -> None:
        """Add records at the end. Raises OSError; a part that was written is overwritten later."""
        start = HEAD_BYTES + self.records * RECORD_BYTES
        _write_all(self._fd, self._encode(records), start)
        self.records += len(records)

    def rewrite(self, records: Sequence[IndexRecord]) -> None:
        """Replace the file by one with these records. Raises OSError and leaves the old one."""
        path = self._path.with_suffix(".new")
        with suppress(FileNotFoundError):
            path.unlink()
        fd = self._open(path)
        try:
            _write_all(fd, self._head + self._encode(records), 0)
            path.replace(self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.records = fd, len(records)

    def needs_rewrite(self, live: int) -> bool:
        """Whether more than half of the records are dead, and not just a few."""
        return self.records > 2 * live + SPARE_RECORDS

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read_all(self) -> bytes:
        size, parts, at = os.fstat(self._fd).st_size, [], 0
        while at < size and (part := os.pread(self._fd, min(size - at, 1 << 24), at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _reset(self, fd: int) -> None:
        os.ftruncate(fd, 0)
        _write_all(fd, self._head, 0)
        self.records = 0

    def _encode(self, records: Sequence[IndexRecord]) -> bytes:
        packed = [_RECORD.pack(*record) for record in records]
        return b"".join(part + _CRC.pack(zlib.crc32(part, self._seed)) for part in packed)

    def _valid_records(self, data: memoryview) -> Iterator[IndexRecord]:
        crc32, seed, size = zlib.crc32, self._seed, _RECORD.size
        crcs = array("I", data.tobytes())[size // 4 :: RECORD_BYTES // 4]
        records = Struct(f"<{_RECORD.format[1:]}4x").iter_unpack(data)
        for number, (record, crc) in enumerate(zip(records, crcs, strict=True)):
            start = number * RECORD_BYTES
            if crc32(data[start : start + size], seed) == crc:
                yield record


def _live_records(records: Iterator[IndexRecord]) -> list[IndexRecord]:
    by_slot: dict[int, IndexRecord] = {}
    slots: dict[int, int] = {}
    for record in records:
        slot, block_hash = record[0], record[1]
        by_slot.pop(slot, None)
        by_slot[slot] = record
        previous = slots.get(block_hash, slot)
        slots[block_hash] = slot
        if previous != slot and by_slot.get(previous, (0, None))[1] == block_hash:
            del by_slot[previous]
    return list(by_slot.values())


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
