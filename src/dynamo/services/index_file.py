"""The file that preserves an indexer's index over a restart."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.core.host.private_folders import make_private
from dynamo.scheduling.index.kv_index import Chain, KvIndex

SNAPSHOT_VERSION: Final = 2
MAX_FRAME_CHAINS: Final = 64
MAX_FRAME_BLOCKS: Final = 4_096
LENGTH_BYTES: Final = 4
"""A frame is a little-endian length and msgpack: a `_SnapshotHeader`, then `_SnapshotChain`s. A
frame takes about a millisecond, so that a process can serve in between."""


class _SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    block_tokens: int


class _SnapshotChain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks (packed u64) below `parent`, and worker -> how many of them it holds."""

    parent: int
    hashes: bytes
    holders: dict[str, int]


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_SnapshotHeader).decode
_decode_chains = msgspec.msgpack.Decoder(list[_SnapshotChain]).decode


def encode_snapshot(index: KvIndex, block_tokens: int) -> Generator[bytes, None, None]:
    """Yield frames with the state of the index at the time of the second frame.

    The index may change between frames. Only one snapshot of an index may be open at a time. Close
    a generator that is not exhausted.
    """
    yield _encode_frame(_SnapshotHeader(SNAPSHOT_VERSION, block_tokens))
    with closing(index.copy()) as chains:
        while part := _pack_chains(chains):
            yield _encode_frame(part)


def restore_snapshot(index: KvIndex, packed: bytes, block_tokens: int) -> Iterator[None]:
    """Add a snapshot to the index, one frame for each step. Raises `ConfigError` for another
    version or block size, and for other data."""
    frames = _split_frames(packed)
    try:
        header = _decode_header(next(frames, b""))
        if header != _SnapshotHeader(SNAPSHOT_VERSION, block_tokens):
            raise ConfigError(
                f"the saved index has version {header.version} and blocks of {header.block_tokens} "
                f"tokens, not version {SNAPSHOT_VERSION} and {block_tokens} tokens",
                hint="use another file, or delete this one: the index is learnt again",
            )
        yield
        for frame in frames:
            for chain in _decode_chains(frame):
                _store_chain(index, chain)
            yield
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"not a saved index: {error}",
            hint="use another file, or delete this one: the index is learnt again",
        ) from error


def _pack_chains(chains: Iterator[Chain]) -> list[_SnapshotChain]:
    part: list[_SnapshotChain] = []
    blocks = 0
    for parent, hashes, holders in islice(chains, MAX_FRAME_CHAINS):
        part.append(_SnapshotChain(parent, array("Q", hashes).tobytes(), dict(holders)))
        blocks += len(hashes)
        if blocks >= MAX_FRAME_BLOCKS:
            break
    return part


def _encode_frame(content: object) -> bytes:
    packed = _encode(content)
    return len(packed).to_bytes(LENGTH_BYTES, "little") + packed


def _split_frames(packed: bytes) -> Iterator[memoryview]:
    view, at = memoryview(packed), 0
    while at < len(view):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(view[at:start], "little")
        if at > len(view):
            raise ValueError("the last frame is incomplete")
        yield view[start:at]


def _store_chain(index: KvIndex, chain: _SnapshotChain) -> None:
    hashes = array("Q")
    hashes.frombytes(chain.hashes)
    for worker, depth in sorted(chain.holders.items(), key=lambda item: -item[1]):
        index.store(worker, chain.parent, hashes[:depth])


T = TypeVar("T")

SETTING_NAME: Final = "index.file"

MAX_SLICE_S: Final = 0.001
"""Saving and restoring block the event loop for about this long at a time."""


class IndexFile:
    """Reads and writes the file on threads; encodes and decodes in short slices on the loop."""

    def __init__(self, path: str, block_tokens: int, clock: Clock) -> None:
        self._path = Path(path).expanduser()
        self._block_tokens = block_tokens
        self._clock = clock
        self._save_lock = asyncio.Lock()

    async def restore(self, index: KvIndex) -> int:
        """Add the saved blocks and return how many. Raises `ConfigError` for an unusable file."""
        packed = await self._clock.offload(_read_file, self._path)
        if packed is None:
            return 0
        before = index.block_count
        steps = restore_snapshot(index, packed, self._block_tokens)
        try:
            while self._run_slice(steps) is not None:
                await self._clock.sleep(0)
        except ConfigError as error:
            message = f"{SETTING_NAME}: {self._path} is {error}"
            raise ConfigError(message, hint=error.hint) from error
        return index.block_count - before

    async def save(self, *indexes: KvIndex) -> None:
        """Write a snapshot of the indexes as one, atomically. Raises OSError."""
        async with self._save_lock:
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            file = await self._clock.offload(_create_file, temporary)
            try:
                await self._write(file, indexes)
                await self._clock.offload(_replace_file, file, temporary, self._path)
            except BaseException:
                file.close()
                temporary.unlink(missing_ok=True)
                raise

    async def _write(self, file: IO[bytes], indexes: Sequence[KvIndex]) -> None:
        for number, index in enumerate(indexes):
            with closing(encode_snapshot(index, self._block_tokens)) as frames:
                if number:
                    next(frames)  # the header stands once
                while (part := self._run_slice(frames)) is not None:
                    await self._clock.offload(file.write, b"".join(part))

    def _run_slice(self, steps: Iterator[T]) -> list[T] | None:
        """Return the results of one slice; None if no step was left."""
        deadline = self._clock.now() + MAX_SLICE_S
        results: list[T] = []
        for step in steps:
            results.append(step)
            if self._clock.now() >= deadline:
                break
        return results or None


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise ConfigError(
            f"{SETTING_NAME}: {path} is a folder", hint=f"name a file: {path / 'index.bin'}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{SETTING_NAME}: {path} cannot be read: {error.strerror}",
            hint="name another file, or permit this user to read and write it",
        ) from error


def _replace_file(file: IO[bytes], temporary: Path, path: Path) -> None:
    file.close()
    temporary.replace(path)


def _create_file(path: Path) -> IO[bytes]:
    make_private(path.parent)
    return path.open("wb")
