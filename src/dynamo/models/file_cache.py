"""Files known by their content: references, the user's cache, hashes that are remembered."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dynamo.core.errors import ModelUnavailable

ProgressCallback = Callable[[str, int, int], None]
"""What is being done, bytes done, bytes in all (0: unknown). Called from any thread."""


class FileRef(msgspec.Struct, frozen=True):
    """A file by content. `path` is where its publisher has it; another host may not."""

    name: str
    sha256: str
    size_bytes: int
    path: str = ""


class _HashRecord(msgspec.Struct, frozen=True):
    """A hash that was computed once, valid while size and mtime stay."""

    sha256: str
    size_bytes: int
    mtime_ns: int


def ignore_progress(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def cache_dir(*parts: str) -> Path:
    """A folder of this user's cache (`$XDG_CACHE_HOME/dynamo`, else `~/.cache/dynamo`), made."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    folder = root.joinpath("dynamo", *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable_error(folder, error) from error
    return folder


def hash_file(path: Path, progress: ProgressCallback = ignore_progress) -> str:
    """SHA-256 of a file's content, read in parts."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    with path.open("rb") as source:
        while part := source.read(1 << 20):
            digest.update(part)
            progress(f"checking {path.name}", source.tell(), total)
    return digest.hexdigest()


def store_hash(path: Path, sha256: str) -> None:
    """Write down that `path`, as it is now, has this hash."""
    stat = path.stat()
    note = _HashRecord(sha256, stat.st_size, stat.st_mtime_ns)
    write_atomically(_hash_record_path(path), msgspec.json.encode(note))


def stored_hash(path: Path) -> str | None:
    """The hash written down for `path`, unless the file has changed since."""
    try:
        note = msgspec.json.decode(_hash_record_path(path).read_bytes(), type=_HashRecord)
        stat = path.stat()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    same = (note.size_bytes, note.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    return note.sha256 if same else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write so that readers see the old file or the whole new one."""
    with atomic_replacement(path) as part:
        part.write_bytes(content)


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; takes the place of `path` when the block ends well."""
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
    """Hold the lock file `path` against every other process (blocks; freed when a holder dies)."""
    try:
        handle = path.open("a")
    except OSError as error:
        raise _not_writable_error(path, error) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_ref(path: Path) -> FileRef:
    """A reference to a file as it is now. Raises ModelUnavailable when it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error
    return FileRef(path.name, hashlib.sha256(content).hexdigest(), len(content), str(path))


def find_file(ref: FileRef) -> Path | None:
    """Where this host has the content of `ref`: the publisher's path, or the cache."""
    for candidate in (Path(ref.path), _cache_path(ref)):
        if _has_content(candidate, ref):
            return candidate
    return None


def store_file(ref: FileRef, content: bytes) -> Path:
    """Put fetched content into the cache. Raises ModelUnavailable unless it is what `ref` says."""
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise ModelUnavailable(
            f"{ref.name} arrived damaged: its hash is not {ref.sha256[:12]}…", hint="try again"
        )
    path = _cache_path(ref)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, content)
    return path


def _not_writable_error(path: Path, error: OSError) -> ModelUnavailable:
    return ModelUnavailable(
        f"{path} cannot be written: {error.strerror}",
        hint="set XDG_CACHE_HOME to a folder that you may write to",
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
