"""`DiskPart`: the folder of one worker on a disk, and the blocks that go into its slots and out.

All functions block and may be called from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.errors import ConfigError
from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.host.private_folders import make_private
from dynamo.inference.tiers.codecs import RAW, BlockCodec, CorruptBlock, ForeignBlock
from dynamo.inference.tiers.slot_file import PAGE_BYTES, SlotFile, SlotHeader, pad_to_pages
from dynamo.inference.tiers.slot_index import IndexRecord, SlotIndex
from dynamo.inference.tiers.tier import TierBlock

FORMAT: Final = "blocks-1"
MAX_PARTS: Final = 256
PATH_PARAM: Final = "cache.ssd_path"


class DiskPart:
    """A folder with a lock, the file of slots and its index. Raises `ConfigError` if the folder
    cannot be used. `records`: the index, in the order of the stores; None if it was lost."""

    def __init__(
        self, root: Path, region: MemoryRegion, capacity_bytes: int, layout: str, codec: BlockCodec
    ) -> None:
        self._region = region
        self._codec = codec
        name = f"{FORMAT} {layout} {codec.block_bytes} {codec.kind}"
        self._seed = xxh3_64_intdigest(name.encode())
        self._is_direct = codec.kind == RAW and region.slot_bytes % PAGE_BYTES == 0
        slot_bytes = disk_slot_bytes(codec)
        self.slots = capacity_bytes // slot_bytes
        if not self.slots:
            raise ConfigError(
                f"{capacity_bytes} bytes on disk hold no KV block, which takes {slot_bytes} bytes",
                hint="raise --kv-disk-size, or set it to 0",
                param="cache.ssd_size",
            )
        self.records: list[IndexRecord] | None = []
        try:
            self.folder, self._lock = _lock_part(root, sha256(name.encode()).hexdigest()[:16])
        except OSError as error:
            raise _path_error(root, error) from error
        try:
            self._open_files(slot_bytes)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise self._open_error(error, capacity_bytes) from error
            raise

    def _open_files(self, slot_bytes: int) -> None:
        path = self.folder / "blocks"
        is_new = not path.exists()
        with ExitStack() as opened:
            self.file = SlotFile(path, self._codec.max_bytes)
            opened.callback(self.file.close)
            self.file.reserve(self.slots)
            self.index = SlotIndex(self.folder / "index", slot_bytes, self._seed)
            opened.callback(self.index.close)
            records = self.index.read()
            opened.pop_all()
        if records is not None:
            records = [record for record in records if record[0] < self.slots]
        self.records = [] if is_new else records

    def _open_error(self, error: OSError, capacity_bytes: int) -> ConfigError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _path_error(self.folder, error)
        volume = os.statvfs(self.folder)
        free = volume.f_bavail * volume.f_frsize
        return ConfigError(
            f"{self.folder} has room for {free >> 20} MiB of KV blocks, not for "
            f"{capacity_bytes >> 20} MiB: {error.strerror}",
            hint="lower --kv-disk-size, free space, or choose another --kv-disk-path",
            param="cache.ssd_size",
        )

    def write_block(self, slot: int, generation: int, block: TierBlock) -> bool:
        """Write a block out of its region slot. False if that got another owner meanwhile. Raises
        OSError."""
        generations = self._region.generations
        if generations[block.slot] != block.generation:
            return False
        with ExitStack() as lent:
            (source,) = lent.enter_context(self._region.reading((block.slot,)))
            kind, length = RAW, len(source)
            if self._is_direct:
                payload = source
            else:
                kind, data = self._codec.encode(source)
                length, buffer = len(data), lent.enter_context(self.file.buffer())
                payload = buffer[PAGE_BYTES : PAGE_BYTES + pad_to_pages(length)]
                payload[:length] = data
            checksum = xxh3_64_intdigest(payload[:length], self._seed)
            if generations[block.slot] != block.generation:
                return False  # after the checksum: a later change does not match it
            identity = block.tokens.ljust(IDENTITY_BYTES, b"\0")
            header = SlotHeader(
                block.block_hash, block.parent_hash, generation, identity, kind, length, checksum
            )
            self.file.write(slot, header.encode(self._seed), payload)
        return generations[block.slot] == block.generation

    def read_block(self, slot: int, block: TierBlock) -> None:
        """Read a block into its region slot. Raises `CorruptBlock` or OSError; what is in the
        region slot then is void."""
        file = self.file
        with self._region.writing((block.slot,)) as (target,):
            if self._is_direct:
                self._verify(block, file.read(slot, target), target)
                return
            with file.buffer() as buffer:
                payload = buffer[PAGE_BYTES:]
                header = self._verify(block, file.read(slot, payload), payload)
                self._codec.decode(header.codec, payload[: header.length], target)

    def _verify(self, block: TierBlock, page: bytes, payload: memoryview) -> SlotHeader:
        header = SlotHeader.decode(page, self._seed)
        if header is None:
            raise CorruptBlock("its header is damaged")
        if header.block_hash != block.block_hash:
            raise CorruptBlock("its slot has another block")
        if header.identity != block.tokens.ljust(IDENTITY_BYTES, b"\0"):
            raise ForeignBlock("another prompt has the same hash")
        if header.length > len(payload) or (self._is_direct and header.length != len(payload)):
            raise CorruptBlock(f"its length is {header.length}")
        if xxh3_64_intdigest(payload[: header.length], self._seed) != header.checksum:
            raise CorruptBlock("it does not match its checksum")
        return header

    def scan(self, first: int, end: int) -> Iterator[IndexRecord]:
        """Yield the records of the slots from `first` to `end` by their headers. Raises OSError."""
        for slot in range(first, end):
            header = SlotHeader.decode(self.file.read_header(slot), self._seed)
            if header is not None:
                yield slot, header.block_hash, header.parent_hash, header.generation

    def close(self) -> None:
        """Close the files and release the lock. No other call may be in progress."""
        self.file.close()
        self.index.close()
        os.close(self._lock)


def disk_slot_bytes(codec: BlockCodec) -> int:
    """Return what a block takes on disk."""
    return PAGE_BYTES + pad_to_pages(codec.max_bytes)


def _lock_part(root: Path, digest: str) -> tuple[Path, int]:
    """Make and lock the first free folder of a layout. Returns it and the descriptor that holds the
    lock."""
    for part in range(MAX_PARTS):
        folder = root / f"{digest}-{part}"
        make_private(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(lock, 0o700)  # fails if another user owns it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, lock
        except BlockingIOError:
            os.close(lock)
        except BaseException:
            os.close(lock)
            raise
    raise OSError(errno.EBUSY, f"{MAX_PARTS} workers use it", str(root))


def _path_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"KV blocks cannot be stored in {path}: {error.strerror or error}",
        hint="set --kv-disk-path to a folder on a local disk that this user may write",
        param=PATH_PARAM,
    )
