"""Files identified by SHA-256: references, the user's cache and stored hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ModelUnavailable
from dynamo.core.host.private_folders import make_private

T = TypeVar("T")
MAX_FILE_BYTES = 128 << 20
"""Larger files are not read, apart from weights. The largest tokenizer.json files have 40 MB."""
ProgressCallback = Callable[[str, int, int], None]
"""Called from any thread with activity, bytes done and bytes in all (0: unknown)."""


class FileRef(msgspec.Struct, frozen=True):
    """A file identified by content. `path` is its place on the host of its publisher."""

    name: str
    sha256: str
    size_bytes: int
    path: str = ""


class _HashRecord(msgspec.Struct, frozen=True):
    """A stored hash. The record is valid while size and mtime are unchanged."""

    sha256: str
    size_bytes: int
    mtime_ns: int


def read_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises `ModelUnavailable`, also for a large one."""
    try:
        stat = path.stat()
        if not S_ISREG(stat.st_mode):
            raise ModelUnavailable(f"{path} is not a regular file")
        if stat.st_size > MAX_FILE_BYTES:
            raise ModelUnavailable(f"{path} has {stat.st_size} bytes, at most {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path, kind: type[T], content: str = "valid JSON") -> T:
    """Return the decoded content of a file. Raises `ModelUnavailable`, which names `content`."""
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except DECODE_ERRORS as error:
        raise ModelUnavailable(f"{path} is not {content}: {error}") from error
    except MemoryError as error:
        raise ModelUnavailable(f"{path} needs more memory than there is") from error


def ignore_progress(activity: str, done: int, total: int) -> None:
    """Ignore progress."""


def cache_dir(*parts: str) -> Path:
    """Create and return a folder in `$XDG_CACHE_HOME/dynamo`, else `~/.cache/dynamo`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise ModelUnavailable(
            "this user has no home folder for the cache", hint="set XDG_CACHE_HOME to a folder"
        ) from None
    folder = root.joinpath("dynamo", *parts)
    try:
        make_private(folder)
    except OSError as error:
        raise _not_writable_error(folder, error) from error
    return folder


def hash_file(path: Path, progress: ProgressCallback = ignore_progress) -> str:
    """Return the SHA-256 of a file's content, which is read in chunks."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            progress(f"checking {path.name}", source.tell(), total)
    return digest.hexdigest()


def store_hash(path: Path, sha256: str) -> None:
    """Store the hash of the present content of `path`."""
    stat = path.stat()
    record = _HashRecord(sha256, stat.st_size, stat.st_mtime_ns)
    write_atomically(_hash_record_path(path), msgspec.json.encode(record))


def stored_hash(path: Path) -> str | None:
    """Return the stored hash of `path`, or None if the file has changed since."""
    try:
        record = read_json(_hash_record_path(path), _HashRecord)
        stat = path.stat()
    except (OSError, ModelUnavailable):
        return None
    unchanged = (record.size_bytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    return record.sha256 if unchanged else None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file. Readers see either the old or the new content."""
    with atomic_replacement(path) as part:
        part.write_bytes(content)


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, which replaces `path` if the block succeeds."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _not_writable_error(path, error) from error
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`. Blocks. The lock ends with its process."""
    try:
        handle = path.open("a")
    except OSError as error:
        raise _not_writable_error(path, error) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_ref(path: Path) -> FileRef:
    """Return a reference to a file's present content. Raises `ModelUnavailable`."""
    content = read_file(path)
    return FileRef(path.name, hashlib.sha256(content).hexdigest(), len(content), str(path))


def find_file(ref: FileRef) -> Path | None:
    """Return the path of the content of `ref` on this host: the publisher's path, or the cache."""
    for candidate in (Path(ref.path), _cache_path(ref)):
        if _has_content(candidate, ref):
            return candidate
    return None


def store_file(ref: FileRef, content: bytes) -> Path:
    """Store fetched content in the cache. Raises `ModelUnavailable` if its hash is wrong."""
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise ModelUnavailable(
            f"{ref.name} arrived damaged: its hash is not {ref.sha256[:12]}…", hint="try again"
        )
    path = _cache_path(ref)
    make_private(path.parent)
    write_atomically(path, content)
    return path


def _not_writable_error(path: Path, error: OSError) -> ModelUnavailable:
    return ModelUnavailable(
        f"{path} cannot be written: {error.strerror}",
        hint="set XDG_CACHE_HOME to a writable folder",
    )


def _hash_record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _cache_path(ref: FileRef) -> Path:
    return cache_dir("files") / ref.sha256 / Path(ref.name).name


def _has_content(path: Path, ref: FileRef) -> bool:
    try:
        if not path.is_file() or path.stat().st_size != ref.size_bytes:
            return False
        return hash_file(path) == ref.sha256
    except OSError:
        return False
