"""Discovery in a folder of one machine, without a server. File locks show which processes live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from dynamo.communication.directory import RecordChange, RecordWatch
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.folder import MAX_RECORD_BYTES, FolderLease, prepare_root
from dynamo.communication.discovery.folder_poller import FolderPoller
from dynamo.communication.discovery.folder_secret import keep_secret, open_secret
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.errors import ConfigError, TooLarge

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def folder_of(url: str) -> Path:
    """Return the folder of a `file:` URL. Raises `ConfigError`."""
    path = url.partition(":")[2]
    if not path.strip("/"):
        raise ConfigError(f"{url!r} names no folder", hint="file:/run/user/1000/dynamo/NAME")
    return Path("/" + path.lstrip("/") if path.startswith("//") else path)


class FileDiscovery(Discovery):
    """The backend `file:PATH`.

    One thread does the writes in order. A second thread reads the folder when it changes, and calls
    the loop. The first `put` takes the lease.
    """

    def __init__(self, root: Path, secret: str = "") -> None:
        super().__init__()
        self._root = root
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="discovery-write")
        self._closed = False
        self._lease: FolderLease | None = None
        self._queues: set[ChangeQueue] = set()
        self._state: dict[str, bytes] = {}
        self._poller = FolderPoller(root, self._on_state, self._check_lease)

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Create the folder, and its secret, if they are missing. Raises `ConfigError`."""
        root = folder_of(url)
        await asyncio.to_thread(prepare_root, root)
        configured = options.secret or options.tls
        return cls(root, "" if configured else await asyncio.to_thread(open_secret, root))

    @property
    def secret(self) -> str:
        return self._secret

    async def put(self, key: str, value: bytes) -> None:
        if "\n" in key or len(key) + len(value) >= MAX_RECORD_BYTES:
            raise TooLarge(f"record {key[:100]!r} has a line break in its key or is too large")
        await self._run_on_writer(self._put, key, value)
        self._poller.wake()

    async def delete(self, key: str) -> None:
        await self._run_on_writer(self._delete, key)
        self._poller.wake()

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        await self._poller.poll()
        return {key: value for key, value in self._state.items() if key.startswith(prefix)}

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        await self._poller.poll()
        queue = ChangeQueue(prefix)
        queue.start(self._state)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        super().on_lease_lost(callback)
        self._poller.start()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._run_on_writer(self._release)
            self._writer.shutdown(wait=False)

    async def _run_on_writer(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_in_executor(self._writer, lambda: work(*args, **kwargs))

    def _on_state(self, state: dict[str, bytes]) -> None:
        """Push the differences to `state` to all watches. Runs on the loop."""
        before, self._state = self._state, state
        changes = [RecordChange(key, None) for key in before if key not in state]
        changes += [
            RecordChange(key, value) for key, value in state.items() if before.get(key) != value
        ]
        if changes:
            for queue in self._queues:
                queue.push(changes)

    def _check_lease(self) -> None:
        """Notice a removed lease folder. Runs on the poller's thread."""
        lease = self._lease
        if lease is not None and not lease.is_intact():
            self._writer.submit(self._on_lease_lost, lease)

    def _on_lease_lost(self, lease: FolderLease) -> None:
        """Report a removed lease folder once. Runs on the writer's thread."""
        if self._lease is lease:
            self._lease = None
            lease.close()
            for callback in self._lease_lost_callbacks:
                self._loop.call_soon_threadsafe(callback)

    def _put(self, key: str, value: bytes) -> None:
        if self._lease is not None and not self._lease.is_intact():
            self._on_lease_lost(self._lease)
        lease = self._lease or self._take_lease()
        try:
            lease.put(key, value)
        except FileNotFoundError:  # the folder was moved
            self._on_lease_lost(lease)
            self._take_lease().put(key, value)

    def _take_lease(self) -> FolderLease:
        """Create a lease, also in a folder that was deleted. The secret comes first: a process that
        finds a lease takes the secret from it."""
        prepare_root(self._root)
        if self._secret and keep_secret(self._root, self._secret) != self._secret:
            log.error("the discovery folder has another secret now; restart this process")
        self._lease = FolderLease(self._root, self._secret)
        return self._lease

    def _delete(self, key: str) -> None:
        if self._lease is not None:
            self._lease.delete(key)

    def _release(self) -> None:
        self._poller.stop()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
