"""Records as files in a folder that processes share.

    ROOT/LEASE/lock       locked with flock by the owner; the kernel frees it when the owner dies.
                          Holds the owner's secret (`folder_secret`)
    ROOT/LEASE/<digest>   a record: the key, a newline, the value
    ROOT/.reserve         disk space for the records of processes that start on a full disk

All calls block. Readers delete a lease whose lock is free, and no files with other names. Records
are written by rename, so that no reader sees half a record.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.discovery.disk_reserve import RESERVE_FOLDER, DiskReserve
from dynamo.core.errors import ConfigError
from dynamo.core.host.private_folders import close_to_others, foreign_reason, make_private

log = logging.getLogger(__name__)
OnOpen = Callable[[Path], None]

LOCK_FILE: Final = "lock"
_LEASE_NAME: Final = re.compile(r"[0-9a-f]{16}")
_RECORD_NAME: Final = re.compile(r"\.?[0-9a-f]{32}")
MAX_RECORD_BYTES: Final = 16 << 20
MAX_SECRET_BYTES: Final = 256
_RACY_NS: Final = 100_000_000
"""Files modified this recently are read again: a later change may have the same time stamp."""


def prepare_root(path: Path) -> None:
    """Create the folder for this user alone, or take the right to write from other users. Raises
    `ConfigError` if it belongs to another user or is shared by all, as /tmp is."""
    try:
        make_private(path)
        status = path.stat()
        if not status.st_mode & stat.S_ISVTX:
            close_to_others(path.resolve(), stat.S_IWGRP | stat.S_IWOTH)
            status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"the discovery folder {path} cannot be used: {error.strerror}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"other users can write to the discovery folder {path}",
            hint="choose a folder of your own with --discovery file:PATH",
        )


def record_file_name(key: str) -> str:
    """Return the file name of a key: a digest of 32 hex digits."""
    return blake2b(key.encode(), digest_size=16).hexdigest()


class FolderLease:
    """The records of one process. Readers drop them when the lease closes or the process dies."""

    def __init__(self, root: Path, secret: str = "") -> None:
        name = new_incarnation()
        self.folder = root / name
        self._reserve = DiskReserve(root / RESERVE_FOLDER)
        unfinished = root / f".{name}"
        self._reserve.make_folder(unfinished)
        try:
            self._reserve.write_file(unfinished / LOCK_FILE, secret.encode())
        except OSError:
            unfinished.rmdir()
            raise
        self._lock_descriptor = os.open(unfinished / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        os.fchmod(self._lock_descriptor, 0o600)
        fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX)
        unfinished.rename(self.folder)

    def is_intact(self) -> bool:
        """Return True while the lock file is still in the folder."""
        return os.fstat(self._lock_descriptor).st_nlink > 0

    def put(self, key: str, value: bytes) -> None:
        """Write or replace a record. Raises `FileNotFoundError` if the folder was removed, and
        `OSError`."""
        name = record_file_name(key)
        temporary = self.folder / f".{name}"
        self._reserve.write_file(temporary, key.encode() + b"\n" + value)
        temporary.replace(self.folder / name)

    def delete(self, key: str) -> None:
        """Remove a record if it exists."""
        (self.folder / record_file_name(key)).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder and release the lock."""
        remove_lease(self.folder)
        os.close(self._lock_descriptor)


def remove_lease(folder: Path) -> None:
    """Remove a lease: the records, then the lock, then the folder. Errors are ignored."""
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
    """Tells whether a folder changed since the last call. An open descriptor makes it one fstat."""

    def __init__(self, path: Path, on_open: OnOpen) -> None:
        self._path = path
        self._on_open = on_open
        self._descriptor = -1
        self._last_mtime_ns = -1

    def has_changed(self) -> bool:
        """Return True if the folder changed, or so recently that a change may be hidden."""
        if self._descriptor < 0:
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
                self._descriptor = os.open(self._path, flags)
            except OSError:
                return True
            self._on_open(self._path)
        status = os.fstat(self._descriptor)
        if status.st_nlink == 0:
            self.close()
            return True
        if status.st_mtime_ns == self._last_mtime_ns:
            return False
        recent = time.time_ns() - status.st_mtime_ns <= _RACY_NS
        self._last_mtime_ns = -1 if recent else status.st_mtime_ns
        return True

    def close(self) -> None:
        """Close the folder's descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderReader:
    """Reads the live records of a folder. Unchanged files are not read again. `on_open` is called
    with each folder before it is read for the first time."""

    def __init__(self, root: Path, on_open: OnOpen = lambda _: None) -> None:
        self._root = root
        self._on_open = on_open
        self._change_detector = _ChangeDetector(root, on_open)
        self._lease_readers: dict[str, _LeaseReader] = {}

    def poll(self) -> dict[str, bytes] | None:
        """Return all live records by key, or None if nothing changed since the last call."""
        changed = self._change_detector.has_changed() and self._scan_leases()
        for name, lease in list(self._lease_readers.items()):
            if not lease.is_alive():
                if lease.abandoned:
                    remove_lease(self._root / name)
                self._lease_readers.pop(name).close()
                changed = True
            elif lease.refresh():
                changed = True
        return self._merge_records() if changed else None

    def read_lease_secrets(self) -> set[str]:
        """Return the secrets of all live leases, "" for a lease without one."""
        self._scan_leases()
        leases = self._lease_readers.values()
        return {lease.read_secret() for lease in leases if lease.is_alive()}

    def _scan_leases(self) -> bool:
        present = set(self._list_leases())
        removed = [name for name in self._lease_readers if name not in present]
        new = present.difference(self._lease_readers)
        for name in removed:
            self._lease_readers.pop(name).close()
        for name in new:
            self._lease_readers[name] = _LeaseReader(self._root / name, self._on_open)
        return bool(removed or new)

    def close(self) -> None:
        """Close all descriptors."""
        for lease in self._lease_readers.values():
            lease.close()
        self._lease_readers.clear()
        self._change_detector.close()

    def _list_leases(self) -> Iterator[str]:
        """Yield the leases of this user. Others may have added some to a folder that was open."""
        with suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                if not _LEASE_NAME.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):  # removed by its owner
                    if not foreign_reason(entry.stat(follow_symlinks=False)):
                        yield entry.name

    def _merge_records(self) -> dict[str, bytes]:
        """Merge the records of all leases. The latest written value of a key wins."""
        newest: dict[str, _RecordFile] = {}
        for lease in self._lease_readers.values():
            for record in lease.records.values():
                previous = newest.get(record.key)
                if previous is None or record.written_ns >= previous.written_ns:
                    newest[record.key] = record
        return {key: record.value for key, record in newest.items()}


class _RecordFile:
    __slots__ = ("key", "signature", "value", "written_ns")

    def __init__(self, key: str, value: bytes, status: os.stat_result) -> None:
        self.key = key
        self.value = value
        self.written_ns = status.st_mtime_ns
        self.signature = _signature(status)


class _LeaseReader:
    """Reads one lease folder and checks whether its owner lives."""

    def __init__(self, folder: Path, on_open: OnOpen) -> None:
        self._folder = folder
        self._change_detector = _ChangeDetector(folder, on_open)
        self._reported: set[str] = set()
        self.abandoned = False
        self.records: dict[str, _RecordFile] = {}
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_descriptor = os.open(folder / LOCK_FILE, flags)
        except OSError:
            self._lock_descriptor = -1

    def is_alive(self) -> bool:
        """Return True while the owner holds the lock."""
        if self._lock_descriptor < 0:
            return False
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self.abandoned = True
        return False

    def read_secret(self) -> str:
        """Return the secret in the lock file."""
        return os.pread(self._lock_descriptor, MAX_SECRET_BYTES, 0).decode()

    def refresh(self) -> bool:
        """Read changed records. Returns True if there were any."""
        if not self._change_detector.has_changed():
            return False
        before = self.records
        self.records = self._scan_records(time.time_ns())
        return before != self.records

    def close(self) -> None:
        """Close all descriptors."""
        self._change_detector.close()
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _scan_records(self, now_ns: int) -> dict[str, _RecordFile]:
        records: dict[str, _RecordFile] = {}
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not _RECORD_NAME.fullmatch(entry.name) or entry.name.startswith("."):
                    continue
                record = self._load_record(entry, now_ns)
                if record is not None:
                    records[entry.name] = record
        return records

    def _load_record(self, entry: os.DirEntry[str], now_ns: int) -> _RecordFile | None:
        previous = self.records.get(entry.name)
        try:
            status = entry.stat(follow_symlinks=False)
            old = now_ns - status.st_mtime_ns > _RACY_NS
            if previous is not None and old and previous.signature == _signature(status):
                return previous
            record = _read_record(entry, status)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn_once(entry, error)
            return None
        if previous is not None and (previous.key, previous.value) == (record.key, record.value):
            previous.signature, previous.written_ns = record.signature, record.written_ns
            return previous
        return record

    def _warn_once(self, entry: os.DirEntry[str], error: Exception) -> None:
        if entry.name not in self._reported:
            self._reported.add(entry.name)
            fields = {"path": entry.path, "error": str(error)}
            log.warning("bad discovery entry skipped", extra={"fields": fields})


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read_record(entry: os.DirEntry[str], status: os.stat_result) -> _RecordFile:
    """Read a record's file. Raises `ValueError` if it is not a record, `OSError`."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > MAX_RECORD_BYTES:
        raise ValueError(f"larger than {MAX_RECORD_BYTES} bytes")
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        head, newline, value = file.read().partition(b"\n")
    key = head.decode()
    if not newline or record_file_name(key) != entry.name:
        raise ValueError("the file name does not match the key")
    return _RecordFile(key, value, status)
