"""The file that preserves an indexer's index over a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Final, TypeVar

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.core.host.private_folders import make_private
from dynamo.scheduling.index.kv_index import KvIndex
from dynamo.scheduling.index.snapshot import encode_snapshot, restore_snapshot

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
