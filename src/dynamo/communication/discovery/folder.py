"""Records in a folder that processes share: files, and locks that the kernel frees.

    ROOT/LEASE/lock       held under flock by its owner as long as that lives
    ROOT/LEASE/<digest>   one record: the key, a newline, the value

Blocking; the discovery backend calls it off the loop. Whoever finds a lease whose lock is free
removes it, and touches nothing that has another shape. Writing is by rename, so that nobody reads
half a record.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from dynamo.communication.addresses import new_incarnation
from dynamo.core.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE: Final = "lock"
_LEASE_NAME: Final = re.compile(r"[0-9a-f]{16}")
_RECORD_NAME: Final = re.compile(r"\.?[0-9a-f]{32}")
MAX_RECORD_BYTES: Final = 16 << 20
_RACY_NS: Final = 100_000_000
"""A time stamp younger than this may hide a later change: what bears it is read again."""


def prepare_root(path: Path) -> None:
    """Make the folder, readable by this user alone. Raises `ConfigError`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.stat()
    except OSError as error:
        raise ConfigError(
            f"the discovery folder {path} cannot be used: {error.strerror}"
        ) from error
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise ConfigError(
            f"the discovery folder {path} can be written by others",
            hint=f"chmod 700 {path}, or name another folder by --discovery file:PATH",
        )


def record_file_name(key: str) -> str:
    """Any key as a safe name of 32 characters."""
    return blake2b(key.encode(), digest_size=16).hexdigest()


class FolderLease:
    """One owner's records. They vanish for everybody when it closes or its process dies."""

    def __init__(self, root: Path) -> None:
        name = new_incarnation()
        self.folder = root / name
        making = root / f".{name}"
        making.mkdir(mode=0o700)
        self._lock_descriptor = os.open(
            making / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX)
        making.rename(self.folder)

    def is_intact(self) -> bool:
        """Whether the lock is still in the folder."""
        return os.fstat(self._lock_descriptor).st_nlink > 0

    def put(self, key: str, value: bytes) -> None:
        """Write or replace one record. Raises `FileNotFoundError` where the lease was removed."""
        name = record_file_name(key)
        part = self.folder / f".{name}"
        part.write_bytes(key.encode() + b"\n" + value)
        part.replace(self.folder / name)

    def delete(self, key: str) -> None:
        """Remove one record, if it is there."""
        (self.folder / record_file_name(key)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything and let go of the lock."""
        remove_lease(self.folder)
        os.close(self._lock_descriptor)


def remove_lease(folder: Path) -> None:
    """Remove the records, then the lock, then the folder, as far as they are there."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _RECORD_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        (folder / LOCK_FILE).unlink(missing_ok=True)
        folder.rmdir()


def remove_dead_leases(root: Path) -> None:
    """Remove the leases whose owners are dead."""
    reader = FolderReader(root)
    reader.poll()
    reader.close()


class _ChangeDetector:
    """A folder, and whether it changed since it was last asked. Stays open, so that asking costs
    one system call."""

    __slots__ = ("_descriptor", "_last_mtime_ns", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._last_mtime_ns = -1

    def has_changed(self) -> bool:
        """True also where it changed so lately that a later change may bear the same time."""
        if self._descriptor < 0:
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags)
            except OSError:
                return True
        about = os.fstat(self._descriptor)
        if about.st_nlink == 0:
            self.close()
            return True
        if about.st_mtime_ns == self._last_mtime_ns:
            return False
        racy = time.time_ns() - about.st_mtime_ns <= _RACY_NS
        self._last_mtime_ns = -1 if racy else about.st_mtime_ns
        return True

    def close(self) -> None:
        """Let go of the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderReader:
    """Reads all live records of a folder, and only what changed since the last time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._change_detector = _ChangeDetector(root)
        self._lease_readers: dict[str, _LeaseReader] = {}

    def poll(self) -> dict[str, bytes] | None:
        """Every live record by key; None: nothing changed since the last look."""
        changed = self._change_detector.has_changed() and self._scan_leases()
        for name, other in list(self._lease_readers.items()):
            if not other.is_alive():
                if other.abandoned:
                    remove_lease(self._root / name)
                self._lease_readers.pop(name).close()
                changed = True
            elif other.refresh():
                changed = True
        return self._merge_records() if changed else None

    def _scan_leases(self) -> bool:
        present = set(self._list_leases())
        left = [name for name in self._lease_readers if name not in present]
        new = present.difference(self._lease_readers)
        for name in left:
            self._lease_readers.pop(name).close()
        for name in new:
            self._lease_readers[name] = _LeaseReader(self._root / name)
        return bool(left or new)

    def close(self) -> None:
        """Let go of the files."""
        for other in self._lease_readers.values():
            other.close()
        self._lease_readers.clear()
        self._change_detector.close()

    def _list_leases(self) -> Iterator[str]:
        with suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                if _LEASE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield entry.name

    def _merge_records(self) -> dict[str, bytes]:
        """Of two owners of a key, the later writer's value counts."""
        newest: dict[str, _RecordFile] = {}
        for other in self._lease_readers.values():
            for record in other.records.values():
                known = newest.get(record.key)
                if known is None or record.written_ns >= known.written_ns:
                    newest[record.key] = record
        return {key: record.value for key, record in newest.items()}


class _RecordFile:
    __slots__ = ("key", "signature", "value", "written_ns")

    def __init__(self, key: str, value: bytes, about: os.stat_result) -> None:
        self.key = key
        self.value = value
        self.written_ns = about.st_mtime_ns
        self.signature = _signature(about)


class _LeaseReader:
    """One lease as its readers know it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._change_detector = _ChangeDetector(folder)
        self._reported: set[str] = set()
        self.abandoned = False
        self.records: dict[str, _RecordFile] = {}
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_descriptor = os.open(folder / LOCK_FILE, flags)
        except OSError:
            self._lock_descriptor = -1

    def is_alive(self) -> bool:
        """Whether somebody holds the lock."""
        if self._lock_descriptor < 0:
            return False
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self.abandoned = True
        return False

    def refresh(self) -> bool:
        """Read what changed; whether anything did."""
        if not self._change_detector.has_changed():
            return False
        before = self.records
        self.records = self._scan_records(time.time_ns())
        return before != self.records

    def close(self) -> None:
        """Let go of the files."""
        self._change_detector.close()
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _scan_records(self, now_ns: int) -> dict[str, _RecordFile]:
        found: dict[str, _RecordFile] = {}
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not _RECORD_NAME.fullmatch(entry.name) or entry.name.startswith("."):
                    continue
                record = self._load_record(entry, now_ns)
                if record is not None:
                    found[entry.name] = record
        return found

    def _load_record(self, entry: os.DirEntry[str], now_ns: int) -> _RecordFile | None:
        known = self.records.get(entry.name)
        try:
            about = entry.stat(follow_symlinks=False)
            old = now_ns - about.st_mtime_ns > _RACY_NS
            if known is not None and old and known.signature == _signature(about):
                return known
            record = _read_record(entry, about)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn_once(entry, error)
            return None
        if known is not None and (known.key, known.value) == (record.key, record.value):
            known.signature, known.written_ns = record.signature, record.written_ns
            return known
        return record

    def _warn_once(self, entry: os.DirEntry[str], error: Exception) -> None:
        if entry.name not in self._reported:
            self._reported.add(entry.name)
            fields = {"path": entry.path, "error": str(error)}
            log.warning("bad discovery entry skipped", extra={"fields": fields})


def _signature(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_ino, about.st_mtime_ns, about.st_size


def _read_record(entry: os.DirEntry[str], about: os.stat_result) -> _RecordFile:
    """Raises `ValueError` for what is no record, `OSError` for what cannot be read."""
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    if about.st_size > MAX_RECORD_BYTES:
        raise ValueError(f"over {MAX_RECORD_BYTES} bytes")
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        head, newline, value = file.read().partition(b"\n")
    key = head.decode()
    if not newline or record_file_name(key) != entry.name:
        raise ValueError("its name does not fit its key")
    return _RecordFile(key, value, about)
