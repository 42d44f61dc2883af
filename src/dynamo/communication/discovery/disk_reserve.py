"""Disk space kept for records, so that processes can be replaced while the disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dynamo.core.host.private_folders import make_private

RESERVE_FOLDER: Final = ".reserve"
"""The folder of the reserve in a discovery folder, on the same file system as the records."""
FULL_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
MIN_FREE_BYTES: Final = 16 << 10
"""A disk with less free space is reported as full."""
_FILE_BYTES: Final = (4 << 10,) * 56 + (32 << 10,)
"""Until it serves, a worker writes 19 files, a frontend 8 and their supervisor 6. A model card may
be large, and all others have at most 1 KB."""
_SPARE_FOLDERS: Final = 4


class DiskReserve:
    """Spare files and folders with allocated blocks in a folder. All calls block.

    On a full disk a writer renames a spare file to the name that it needs and overwrites its
    content. This needs no free block, so other programs that fill the disk cannot take the space.
    The supervisor fills the reserve and all processes of the deployment use it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spare_files = [
            (folder / f"file-{number}", size) for number, size in enumerate(_FILE_BYTES)
        ]
        self._spare_folders = [folder / f"folder-{number}" for number in range(_SPARE_FOLDERS)]

    def fill(self) -> bool:
        """Create missing files and folders. Returns False if the disk is full."""
        try:
            for folder in (self._folder, *self._spare_folders):
                make_private(folder)
            for path, size in self._spare_files:
                if not path.exists():
                    _allocate(path, size)
            return self.free_bytes() >= MIN_FREE_BYTES
        except OSError:
            return False

    def free_bytes(self) -> int:
        """Return the free space of the disk for this user. Raises `OSError`."""
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a new file. Raises `OSError`."""

        def overwrite_spare_file() -> bool:
            large = [spare for spare, size in self._spare_files if size >= len(data)]
            if not _rename_first(large, path):
                return False
            with path.open("r+b") as file:
                file.write(data)
                file.truncate()
            return True

        def write() -> None:
            path.write_bytes(data)

        try:
            _with_fallback(write, overwrite_spare_file)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def make_folder(self, path: Path) -> None:
        """Create a new folder for this user alone. Raises `OSError`."""
        _with_fallback(
            lambda: path.mkdir(mode=0o700), lambda: _rename_first(self._spare_folders, path)
        )

    def remove(self) -> None:
        """Delete the reserve. Errors are ignored."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                path.rmdir() if path.is_dir() else path.unlink()
            self._folder.rmdir()


def _with_fallback(work: Callable[[], None], on_full_disk: Callable[[], bool]) -> None:
    """Do `work`. If the disk is full, do `on_full_disk`, which returns whether it succeeded."""
    try:
        work()
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS or not on_full_disk():
            raise


def _rename_first(spares: Sequence[Path], path: Path) -> bool:
    """Rename the first spare that exists to `path`. Returns False if there is none."""
    for spare in spares:
        with suppress(FileNotFoundError):  # used by another process
            spare.rename(path)
            return True
    return False


def _allocate(path: Path, size: int) -> None:
    """Write a file of zeros. A file system that compresses zeros does not keep their space."""
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_bytes(bytes(size))
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
