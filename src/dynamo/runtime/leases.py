"""Discovery that keeps its word: records come back after a lost lease, and the I/O of it runs in
the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from dynamo.communication.discovery import Discovery, RecordChange, RecordWatch
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.background import ThreadBackground

log = logging.getLogger(__name__)
RETRY_S = 0.5
MAX_RETRY_S = 5.0


class RepublishingDiscovery(Discovery):
    """Remembers what was put, and puts it again when the lease was lost."""

    def __init__(self, inner: Discovery) -> None:
        self._inner = inner
        self._records: dict[str, bytes] = {}
        self._tasks = BackgroundTasks()
        self._lease_lost_listeners: list[Callable[[], None]] = []
        inner.on_lease_lost(self._on_lease_lost)

    @property
    def connection_error(self) -> str:
        return self._inner.connection_error

    async def put(self, key: str, value: bytes) -> None:
        self._records[key] = value
        await self._inner.put(key, value)

    async def delete(self, key: str) -> None:
        self._records.pop(key, None)
        await self._inner.delete(key)

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        return await self._inner.get(prefix)

    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        return self._inner.watch(prefix)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._lease_lost_listeners.append(callback)

    async def close(self) -> None:
        await self._tasks.close()
        await self._inner.close()

    def _on_lease_lost(self) -> None:
        log.warning("lease lost", extra={"fields": {"records": len(self._records)}})
        self._tasks.start(self._republish(), "put-again")
        for callback in self._lease_lost_listeners:
            callback()

    async def _republish(self) -> None:
        delay_s = RETRY_S
        waiting = set(self._records)
        while waiting:
            try:
                for key in sorted(waiting):
                    if (value := self._records.get(key)) is not None:
                        await self._inner.put(key, value)
                    waiting.discard(key)
            except Exception as error:  # noqa: BLE001 - retried until the plane is back
                log.warning("cannot announce again", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, MAX_RETRY_S)


class BackgroundDiscovery(Discovery):
    """A discovery plane that lives on the background's loop, used from the primary's."""

    def __init__(self, inner: Discovery, background: ThreadBackground) -> None:
        self._inner = inner
        self._background = background
        self._loop = asyncio.get_running_loop()

    @property
    def connection_error(self) -> str:
        return self._inner.connection_error

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
        arrived: asyncio.Queue[Sequence[RecordChange] | None] = asyncio.Queue()

        async def pump() -> None:
            async with self._inner.watch(prefix) as changes:
                async for batch in changes:
                    self._call_on_primary(arrived.put_nowait, batch)

        pumping = self._background.submit(pump())
        pumping.add_done_callback(lambda _: self._call_on_primary(arrived.put_nowait, None))
        try:
            async with aclosing(_batches(arrived, pumping)) as batches:
                yield batches
        finally:
            pumping.cancel()

    def _call_on_primary(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the primary loop has closed
            self._loop.call_soon_threadsafe(callback, *args)


async def _batches(
    arrived: asyncio.Queue[Sequence[RecordChange] | None], pumping: Future[None]
) -> AsyncGenerator[Sequence[RecordChange], None]:
    while (batch := await arrived.get()) is not None:
        yield batch
    if not pumping.cancelled():
        pumping.result()
