"""The file in which an indexer keeps its index over a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Final, TypeVar

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.scheduling.index.kv_index import KvIndex
from dynamo.scheduling.index.snapshot import encode_snapshot, restore_snapshot

T = TypeVar("T")

SETTING_NAME: Final = "index.file"

MAX_SLICE_S: Final = 0.001
"""Saving and restoring hold the loop about so long at a time."""


class IndexFile:
    """Reads and writes on threads; copies, encodes and takes in by turns with the rest of the
    loop."""

    def __init__(self, path: str, block_tokens: int, clock: Clock) -> None:
        self._path = Path(path).expanduser()
        self._block_tokens = block_tokens
        self._clock = clock
        self._save_lock = asyncio.Lock()

    async def restore(self, index: KvIndex) -> int:
        """Add what was saved; how many blocks. Raises `ConfigError` where that cannot be used."""
        packed = await self._clock.offload(_read_file, self._path)
        if packed is None:
            return 0
        before = index.block_count
        steps = restore_snapshot(index, packed, self._block_tokens)
        try:
            while self._run_slice(steps) is not None:
                await self._clock.sleep(0)
        except ConfigError as error:
            raise ConfigError(
                f"{SETTING_NAME}: {self._path} is {error}", hint=error.hint
            ) from error
        return index.block_count - before

    async def save(self, index: KvIndex) -> None:
        """The index as it is now, whole or not at all. Raises OSError."""
        async with self._save_lock:
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            file = await self._clock.offload(_create_file, fresh)
            try:
                await self._write(file, index)
                await self._clock.offload(_replace_file, file, fresh, self._path)
            except BaseException:
                file.close()
                fresh.unlink(missing_ok=True)
                raise

    async def _write(self, file: IO[bytes], index: KvIndex) -> None:
        with closing(encode_snapshot(index, self._block_tokens)) as frames:
            while (part := self._run_slice(frames)) is not None:
                await self._clock.offload(file.write, b"".join(part))

    def _run_slice(self, steps: Iterator[T]) -> list[T] | None:
        """What comes of a turn's steps; None: that was all."""
        until = self._clock.now() + MAX_SLICE_S
        done: list[T] = []
        for step in steps:
            done.append(step)
            if self._clock.now() >= until:
                break
        return done or None


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
            hint="name another file, or let this user read and write it",
        ) from error


def _replace_file(file: IO[bytes], fresh: Path, path: Path) -> None:
    file.close()
    fresh.replace(path)


def _create_file(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")
