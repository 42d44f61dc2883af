"""Discovery planes that republish records after a lost lease and run I/O in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from dynamo.communication.discovery import Discovery, RecordChange, RecordWatch
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.core.clock import Backoff
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.background import ThreadBackground

log = logging.getLogger(__name__)
RETRY_S = 0.5
MAX_RETRY_S = 5.0


class SharedWatch:
    """A watch of a plane for all parts of this process that follow the same prefix. Each part has
    a queue, which begins with the present state."""

    def __init__(self) -> None:
        self._state: dict[str, bytes] | None = None
        self.queues: dict[ChangeQueue, None] = {}

    def join(self, prefix: str) -> ChangeQueue:
        """Return a new queue."""
        queue = ChangeQueue(prefix)
        self.queues[queue] = None
        if self._state is not None:
            queue.start(self._state)
        return queue

    async def run(self, watch: AbstractAsyncContextManager[RecordWatch]) -> None:
        """Pass the changes on until cancelled. An error of the watch reaches all queues."""
        try:
            async with watch as changes:
                async for batch in changes:
                    self._apply(batch)
            self._fail(PlaneUnavailable("the watch of a discovery plane ended"))
        except Exception as error:  # noqa: BLE001 - the readers handle it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        for queue in self.queues:
            queue.fail(error)

    def _apply(self, batch: Sequence[RecordChange]) -> None:
        is_first = self._state is None
        state = self._state = self._state or {}
        for change in batch:
            if change.value is None:
                state.pop(change.key, None)
            else:
                state[change.key] = change.value
        for queue in self.queues:
            if is_first:
                queue.start(state)
            else:
                queue.push(batch)


class RepublishingDiscovery(Discovery):
    """The discovery plane as one process uses it: puts its records again after the lease was lost,
    and watches each prefix once."""

    def __init__(self, inner: Discovery) -> None:
        super().__init__()
        self._inner = inner
        self._records: dict[str, bytes] = {}
        self._tasks = BackgroundTasks()
        self._watches: dict[str, tuple[SharedWatch, asyncio.Task[None]]] = {}
        inner.on_lease_lost(self._on_lease_lost)

    @property
    def connection_error(self) -> str:
        return self._inner.connection_error

    @property
    def secret(self) -> str:
        return self._inner.secret

    async def put(self, key: str, value: bytes) -> None:
        self._records[key] = value
        await self._inner.put(key, value)

    async def delete(self, key: str) -> None:
        self._records.pop(key, None)
        await self._inner.delete(key)

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        return await self._inner.get(prefix)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        shared, task = self._watches.get(prefix, (None, None))
        if shared is None or task is None or task.done():
            shared = SharedWatch()
            task = self._tasks.start(shared.run(self._inner.watch(prefix)), f"watch {prefix}")
            self._watches[prefix] = shared, task
        queue = shared.join(prefix)
        try:
            yield queue
        finally:
            del shared.queues[queue]
            if not shared.queues:
                task.cancel()
                if self._watches.get(prefix) == (shared, task):
                    del self._watches[prefix]

    async def revoke_lease_of(self, key: str) -> None:
        await self._inner.revoke_lease_of(key)

    async def close(self) -> None:
        await self._tasks.close()
        await self._inner.close()

    def _on_lease_lost(self) -> None:
        fields = {"records": len(self._records)}
        log.warning("lease lost; records are put again", extra={"fields": fields})
        self._tasks.start(self._republish(), "republish records")
        for callback in self._lease_lost_callbacks:
            callback()

    async def _republish(self) -> None:
        backoff = Backoff(RETRY_S, MAX_RETRY_S)
        missing = set(self._records)
        while missing:
            try:
                for key in sorted(missing):
                    if (value := self._records.get(key)) is not None:
                        await self._inner.put(key, value)
                    missing.discard(key)
            except Exception as error:  # noqa: BLE001 - retried until the plane is back
                log.warning("records cannot be put again", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(backoff.next_s())


class BackgroundDiscovery(Discovery):
    """Gives the primary loop access to a discovery plane on the background's loop."""

    def __init__(self, inner: Discovery, background: ThreadBackground) -> None:
        super().__init__()
        self._inner = inner
        self._background = background
        self._loop = asyncio.get_running_loop()

    @property
    def connection_error(self) -> str:
        return self._inner.connection_error

    @property
    def secret(self) -> str:
        return self._inner.secret

    async def put(self, key: str, value: bytes) -> None:
        await self._background.run(self._inner.put(key, value))

    async def delete(self, key: str) -> None:
        await self._background.run(self._inner.delete(key))

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        return await self._background.run(self._inner.get(prefix))

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._inner.on_lease_lost(lambda: self._call_on_primary(callback))

    async def close(self) -> None:
        await self._background.run(self._inner.close())

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        queue: asyncio.Queue[Sequence[RecordChange] | None] = asyncio.Queue()

        async def pump() -> None:
            async with self._inner.watch(prefix) as changes:
                async for batch in changes:
                    self._call_on_primary(queue.put_nowait, batch)

        pump_future = self._background.submit(pump())
        pump_future.add_done_callback(lambda _: self._call_on_primary(queue.put_nowait, None))
        try:
            async with aclosing(_batches(queue, pump_future)) as batches:
                yield batches
        finally:
            pump_future.cancel()

    def _call_on_primary(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the primary loop has closed
            self._loop.call_soon_threadsafe(callback, *args)


async def _batches(
    queue: asyncio.Queue[Sequence[RecordChange] | None], pump_future: Future[None]
) -> AsyncGenerator[Sequence[RecordChange], None]:
    while (batch := await queue.get()) is not None:
        yield batch
    if not pump_future.cancelled():
        pump_future.result()  # raises the error that ended the watch
