"""An event loop in a thread of its own, for an engine that blocks or takes over the main thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")
END_TIMEOUT_S = 5.0
"""Time for the tasks of a thread to end after their cancellation."""
JOIN_TIMEOUT_S = 7.0
"""Time for a thread to end, with the time for its tasks."""


class EngineThread:
    """The thread lives from the first call until `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` in the thread, await its result there and return it."""

        async def run() -> T:
            result = call()
            return await result if isinstance(result, Awaitable) else result

        return await asyncio.wrap_future(self._submit(run()))

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the thread, after everything that was started before."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    def stream(
        self, start: Callable[[], Awaitable[AsyncIterator[Any]]], abort: Callable[[], object]
    ) -> ThreadStream:
        """Iterate in the thread over what `start` returns. `abort` ends it early there."""
        stream = ThreadStream(self, abort)
        self._submit(stream.pump(start))
        return stream

    async def close(self) -> None:
        """Cancel all streams and end the thread. A thread that the engine blocks is left alone."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_end_tasks(loop), loop)
            await asyncio.to_thread(thread.join, JOIN_TIMEOUT_S)
            if not thread.is_alive():
                loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name=self._name, daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a thread, also those that the engine has started, and stop its loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
    loop.stop()


class ThreadStream:
    """The items of an iterator in an `EngineThread`, for one task of the event loop."""

    def __init__(self, thread: EngineThread, abort: Callable[[], object]) -> None:
        self._thread = thread
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._aborted = False

    async def pump(self, start: Callable[[], Awaitable[AsyncIterator[Any]]]) -> None:
        """Pass the items on. Runs in the thread."""
        try:
            iterator = await start()
            async with aclosing(iterator):  # type: ignore[type-var]
                async for item in iterator:
                    self._put((item, None))
                    if self._aborted:  # before, the engine may not have known the request
                        self._abort()
                        break
            self._put((None, StopAsyncIteration()))
        except Exception as error:  # noqa: BLE001 - is raised by `__anext__`
            self._put((None, error))

    def __aiter__(self) -> ThreadStream:
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Raises the engine's error."""
        item, error = await self._items.get()
        if error is not None:
            raise error
        return item

    def abort(self) -> None:
        """End the iteration early. Returns at once; the engine may continue for a step."""
        self._aborted = True
        self._thread.call_soon(self._abort)

    def _put(self, entry: tuple[Any, Exception | None]) -> None:
        self._loop.call_soon_threadsafe(self._items.put_nowait, entry)
