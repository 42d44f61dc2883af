"""Folders that only this user may enter: state, caches and records of running processes."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

OPEN_BITS: Final = 0o077
"""Mode bits by which other users may enter, read or change a folder."""


def make_private(folder: Path) -> None:
    """Create a folder and each missing parent with mode 0700. Existing folders stay as they are.
    Blocks. Raises `OSError`."""
    missing = []
    level = folder
    while not os.path.lexists(level):
        missing.append(level)
        level = level.parent
    for level in reversed(missing):
        with suppress(FileExistsError):  # made by another process at the same time
            level.mkdir(mode=0o700)  # `parents=True` would give parents the mode of the umask
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def foreign_reason(status: os.stat_result) -> str:
    """Return why a path cannot be a folder of this user, or an empty string."""
    if not stat.S_ISDIR(status.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    return "" if status.st_uid == os.getuid() else "belongs to another user"


def close_to_others(folder: Path, bits: int = OPEN_BITS) -> None:
    """Take the mode `bits` from a folder of this user, with a warning if it had some of them. A
    symbolic link is not followed. Blocks. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_mode & bits and not foreign_reason(status):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~bits)
            log.warning("the folder %s was open to other users and is closed to them now", folder)
    finally:
        os.close(descriptor)
