"""A model that is being fetched: its files, with a journal of the pieces that are in them."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from dynamo.core.errors import ModelUnavailable
from dynamo.models.file_cache import ProgressCallback, hash_file, ignore_progress, write_atomically
from dynamo.models.shelf.manifest import (
    ENTRY_BYTES,
    NO_DIGEST,
    Manifest,
    decode_entries,
    decode_manifest,
    digest_of,
    encode_entries,
    encode_manifest,
)

MANIFEST_FILE = ".manifest"
JOURNAL_FILE = ".pieces"
CLOSED = -1
"""No descriptor."""


class PartialModel:
    """The folder of a model that is being fetched. The caller holds the lock of the model.

    Pieces of an earlier process that died are checked by their hashes and kept. `on_piece` is
    called in the writing thread with each further piece.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.digests: dict[int, bytes] = {}
        self.on_piece: Callable[[int, bytes], object] = lambda *_: None
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, manifest: Manifest, progress: ProgressCallback = ignore_progress
    ) -> PartialModel:
        """Create the folder, or continue one of the same commit. Blocks. Raises
        `ModelUnavailable` if it cannot be written."""
        partial = cls(folder, manifest)
        with partial.storage_errors():
            folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(folder / MANIFEST_FILE, encode_manifest(manifest))
            for index, file in enumerate(manifest.files):
                path = folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                partial._files[index] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.ftruncate(partial._files[index], file.size_bytes)
            partial._restore(progress)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            partial._journal = os.open(folder / JOURNAL_FILE, flags, 0o600)
        return partial

    _journal = CLOSED

    @property
    def done_bytes(self) -> int:
        """Return the bytes of the pieces that are here."""
        pieces = self.manifest.pieces
        return sum(pieces[number].size_bytes for number in tuple(self.digests))

    @property
    def is_complete(self) -> bool:
        """Whether all pieces are here."""
        return len(self.digests) == len(self.manifest.pieces)

    def write(self, number: int, parts: Sequence[bytes], digest: bytes = NO_DIGEST) -> bytes:
        """Store a piece, and return its hash. Blocks. Raises `ValueError` if its size or hash is
        not that of the manifest or `digest`, and `ModelUnavailable` if it cannot be written."""
        piece = self.manifest.pieces[number]
        content_hash = hashlib.sha256()
        for part in parts:
            content_hash.update(part)
        actual = content_hash.digest()
        wanted = {self.manifest.digests[number], digest} - {NO_DIGEST, actual}
        if wanted or sum(map(len, parts)) != piece.size_bytes:
            raise ValueError(f"piece {number} of {self.manifest.name} is damaged")
        with self.storage_errors(), self._lock:
            start = piece.start
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.pwrite(self._files.get(piece.file, CLOSED), view, start)
                    view, start = view[written:], start + written
            os.write(self._journal, encode_entries([(number, actual)]))
            self.digests[number] = actual
        self.on_piece(number, actual)
        return actual

    def read(self, number: int) -> bytes:
        """Return a piece that is here. Blocks. Raises `OSError`, also when this is closed."""
        piece = self.manifest.pieces[number]
        with self._lock:
            return os.pread(self._files.get(piece.file, CLOSED), piece.size_bytes, piece.start)

    def finish(self, progress: ProgressCallback = ignore_progress) -> Manifest:
        """Check each file as a whole, flush all, and return the manifest with all hashes. Blocks.

        A manifest with the hashes of pieces is that of a process that has checked the whole file:
        its bytes are hashed once. Raises `ModelUnavailable` for a file that is not what its source
        names. Its pieces are forgotten.
        """
        files = []
        first = 0
        for index, file in enumerate(self.manifest.files):
            last = first + file.piece_count
            with self.storage_errors():
                actual = file.sha256 if file.digests else ""
                actual = actual or hash_file(self.folder / file.path, progress)
                os.fsync(self._files[index])
            if file.sha256 not in {"", actual}:
                self.forget(range(first, last))
                raise ModelUnavailable(
                    f"{file.path} of {self.manifest.name} has not the hash that its source names",
                    hint="repeat the command: this file is fetched again",
                )
            digests = b"".join(self.digests[number] for number in range(first, last))
            files.append(msgspec.structs.replace(file, sha256=actual, digests=digests))
            first = last
        manifest = msgspec.structs.replace(self.manifest, files=tuple(files))
        with self.storage_errors():
            write_atomically(self.folder / MANIFEST_FILE, encode_manifest(manifest))
            for path in (self.folder / JOURNAL_FILE, *self.folder.glob(".*.head")):
                path.unlink(missing_ok=True)
        return manifest

    def head_path(self, number: int) -> Path:
        """Return the file to which the beginning of a piece is appended while it is read from a
        source, so that a process that dies loses nothing."""
        return self.folder / f".{number}.head"

    def forget(self, numbers: range) -> None:
        """Drop pieces, which must be fetched again. Blocks."""
        with self._lock:
            for number in numbers:
                self.digests.pop(number, None)
            entries = encode_entries(self.digests.items())
        os.ftruncate(self._journal, 0)
        os.write(self._journal, entries)

    def close(self) -> None:
        """Close the files. The folder stays for the next process."""
        with self._lock:
            for handle in (*self._files.values(), self._journal):
                if handle != CLOSED:
                    os.close(handle)
            self._files.clear()
            self._journal = CLOSED

    def _restore(self, progress: ProgressCallback) -> None:
        """Keep the pieces of the journal whose content has their hash."""
        path = self.folder / JOURNAL_FILE
        data = path.read_bytes() if path.exists() else b""
        expected = self.manifest.digests
        for index, (number, digest) in enumerate(decode_entries(data), 1):
            is_expected = number < len(expected) and expected[number] in {NO_DIGEST, digest}
            if is_expected and digest_of(self.read(number)) == digest:
                self.digests[number] = digest
            progress(f"checking {self.manifest.name}", index * ENTRY_BYTES, len(data))
        write_atomically(path, encode_entries(self.digests.items()))

    def storage_errors(self) -> AbstractContextManager[None]:
        """Raise errors of the disk as `ModelUnavailable`."""
        return storage_errors(self.manifest.name, self.folder)


class ShelfUnavailable(ModelUnavailable):
    """A shelf cannot keep a model: the disk, the budget or a right is missing."""


@contextmanager
def storage_errors(name: str, folder: Path) -> Iterator[None]:
    """Raise `OSError` of writing to a shelf as `ModelUnavailable`, in one line."""
    try:
        yield
    except OSError as error:
        what = f"{name} cannot be stored in {folder.parent}: {error.strerror}"
        hint = "set XDG_CACHE_HOME to a writable folder"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            hint = "free disk space, or set XDG_CACHE_HOME to a folder on another disk"
        raise ShelfUnavailable(what, hint=hint) from error


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has no sound one. Blocks."""
    try:
        return decode_manifest((folder / MANIFEST_FILE).read_bytes(), str(folder))
    except (OSError, ModelUnavailable):
        return None
