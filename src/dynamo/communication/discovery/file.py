"""Discovery in a folder, for one machine: no server, and the kernel tells who died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from dynamo.communication.directory import Change, Watch
from dynamo.communication.discovery.feed import Feed
from dynamo.communication.discovery.folder import MAX_RECORD_BYTES, Lease, Reader, open_root
from dynamo.communication.discovery.looker import Looker
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.core.errors import ConfigError, TooLarge

P = ParamSpec("P")
T = TypeVar("T")


class FileDiscovery(Discovery):
    """`file:PATH`. Writes go through one thread, in order; another looks for changes every 100 ms
    and wakes the loop only where there are any. The lease is taken with the first `put`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loop = asyncio.get_running_loop()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="discovery-write")
        self._closed = False
        self._lease: Lease | None = None
        self._lost: list[Callable[[], None]] = []
        self._feeds: set[Feed] = set()
        self._state: dict[str, bytes] = {}
        self._looker = Looker(root, self._take, self._check_lease)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """Make the folder if it is missing. Raises `ConfigError`."""
        del options  # the kernel tells who died: there is no time-to-live
        path = url.partition(":")[2]
        if not path.strip("/"):
            raise ConfigError("file: names no folder", hint="file:/run/user/1000/dynamo/NAME")
        root = Path("/" + path.lstrip("/") if path.startswith("//") else path)
        await asyncio.to_thread(open_root, root)
        return cls(root)

    async def put(self, key: str, value: bytes) -> None:
        if "\n" in key or len(key) + len(value) >= MAX_RECORD_BYTES:
            raise TooLarge(f"record {key[:100]!r} has a line break in its key, or is too large")
        await self._off_loop(self._put, key, value)
        self._looker.wake()

    async def delete(self, key: str) -> None:
        await self._off_loop(self._delete, key)
        self._looker.wake()

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        state = await self._off_loop(_look_once, self._root)
        return {key: value for key, value in state.items() if key.startswith(prefix)}

    def watch(self, prefix: str) -> AbstractAsyncContextManager[Watch]:
        return self._watch(prefix)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._lost.append(callback)
        self._looker.start()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._off_loop(self._release)
            self._writer.shutdown(wait=False)

    @asynccontextmanager
    async def _watch(self, prefix: str) -> AsyncIterator[Watch]:
        await self._looker.look()
        feed = Feed(prefix)
        feed.start(self._state)
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            self._feeds.discard(feed)

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._writer, lambda: work(*args, **kwargs))

    def _take(self, state: dict[str, bytes]) -> None:
        """On the loop: the looker saw changes."""
        before, self._state = self._state, state
        changes = [Change(key, None) for key in before if key not in state]
        changes += [Change(key, value) for key, value in state.items() if before.get(key) != value]
        if changes:
            for feed in self._feeds:
                feed.push(changes)

    def _check_lease(self) -> None:
        """On the looker's thread."""
        lease = self._lease
        if lease is not None and not lease.holds():
            self._writer.submit(self._lose, lease)

    def _lose(self, lease: Lease) -> None:
        """On the writer's thread: somebody removed the folder."""
        if self._lease is lease:
            self._lease = None
            lease.close()
            for callback in self._lost:
                self._loop.call_soon_threadsafe(callback)

    def _put(self, key: str, value: bytes) -> None:
        if self._lease is not None and not self._lease.holds():
            self._lose(self._lease)
        if self._lease is None:
            open_root(self._root)
            self._lease = Lease(self._root)
        try:
            self._lease.put(key, value)
        except FileNotFoundError:  # the folder was moved away
            self._lose(self._lease)
            self._lease = Lease(self._root)
            self._lease.put(key, value)

    def _delete(self, key: str) -> None:
        if self._lease is not None:
            self._lease.delete(key)

    def _release(self) -> None:
        self._looker.stop()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def _look_once(root: Path) -> dict[str, bytes]:
    reader = Reader(root)
    try:
        return reader.look() or {}
    finally:
        reader.close()
