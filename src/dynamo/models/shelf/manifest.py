"""Manifests: the files of one commit of a model, with the hash of each file and of each piece."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ModelUnavailable

PIECE_BYTES = 8 << 20
DIGEST_BYTES = 32
MAX_PIECES = 1 << 18
"""Most pieces of a model, 2 TiB."""
MAX_FILES = 1 << 14
NUMBER_BYTES = 4
ENTRY_BYTES = NUMBER_BYTES + DIGEST_BYTES
"""Size of a piece's number, little-endian, and its hash."""
NO_DIGEST = bytes(DIGEST_BYTES)
_SHA256 = re.compile(r"[0-9a-f]{64}|")
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of a model. `path` is relative to the model's folder.

    `sha256` is "" where the source does not tell it, and `digests` is empty until all pieces are
    here: the SHA-256 of each piece in order, 32 bytes each.
    """

    path: str
    size_bytes: int
    sha256: str = ""
    digests: bytes = b""

    @property
    def piece_count(self) -> int:
        """Return the number of pieces; an empty file has none."""
        return -(-self.size_bytes // PIECE_BYTES)


class Piece(NamedTuple):
    """A part of a file. `number` counts the pieces of the model, `file` its files."""

    number: int
    file: int
    start: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """A commit of a model. `name` is that by which users name the model, without the revision.

    `source` says where the files come from. `with_weights`: whether it has more than the files that
    tell what the model is.
    """

    name: str
    commit: str
    files: tuple[ManifestFile, ...]
    source: str = ""
    with_weights: bool = True

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return all pieces in the order of the files."""
        return tuple(self._split())

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Return the hash of each piece, `NO_DIGEST` where it is not known."""
        return tuple(
            file.digests[start : start + DIGEST_BYTES] if file.digests else NO_DIGEST
            for file in self.files
            for start in range(0, file.piece_count * DIGEST_BYTES, DIGEST_BYTES)
        )

    @property
    def size_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.size_bytes for file in self.files)

    def _split(self) -> Iterator[Piece]:
        number = 0
        for index, file in enumerate(self.files):
            for start in range(0, file.size_bytes, PIECE_BYTES):
                yield Piece(number, index, start, min(PIECE_BYTES, file.size_bytes - start))
                number += 1


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest in msgpack."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes, origin: str) -> Manifest:
    """Decode and check a manifest. Raises `ModelUnavailable`, which names `origin`."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except DECODE_ERRORS as error:
        raise ModelUnavailable(f"{origin} is not a manifest: {error}") from error
    check_manifest(manifest, origin)
    return manifest


def encode_entries(digests: Iterable[tuple[int, bytes]]) -> bytes:
    """Return numbers of pieces and their hashes, ENTRY_BYTES each."""
    return b"".join(number.to_bytes(NUMBER_BYTES, "little") + digest for number, digest in digests)


def decode_entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and hashes of all whole entries."""
    for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        number = data[start : start + NUMBER_BYTES]
        yield int.from_bytes(number, "little"), data[start + NUMBER_BYTES : start + ENTRY_BYTES]


def check_manifest(manifest: Manifest, origin: str) -> None:
    """Raise `ModelUnavailable` for a manifest that nothing can be stored by."""
    paths = [file.path for file in manifest.files]
    problem = ""
    if _COMMIT.fullmatch(manifest.commit) is None:
        problem = f"the commit {manifest.commit[:40]!r}"
    elif not paths or len(paths) > MAX_FILES:
        problem = f"{len(paths)} files, at most {MAX_FILES}"
    elif bad := next((path for path in paths if not _is_inside(path)), None):
        problem = f"a file outside of its folder: {bad[:80]!r}"
    elif len(set(paths)) != len(paths):
        problem = "a file twice"
    elif any(file.size_bytes < 0 for file in manifest.files):
        problem = "a negative size"
    elif (count := sum(file.piece_count for file in manifest.files)) > MAX_PIECES:
        problem = f"{count} pieces, at most {MAX_PIECES}"
    elif not all(map(_has_sound_hashes, manifest.files)):
        problem = "hashes of a wrong length"
    if problem:
        raise ModelUnavailable(f"{origin} has a wrong manifest of {manifest.name}: {problem}")


def digest_of(content: bytes | memoryview) -> bytes:
    """Return the hash of a piece."""
    return hashlib.sha256(content).digest()


def _has_sound_hashes(file: ManifestFile) -> bool:
    length = len(file.digests)
    return bool(_SHA256.fullmatch(file.sha256)) and length in {0, file.piece_count * DIGEST_BYTES}


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(
        parts
        and "/".join(parts) == path
        and not path.startswith("/")
        and not any(part in {"..", "."} or part.startswith(".") for part in parts)
        and path.isprintable()
        and "\\" not in path
    )
