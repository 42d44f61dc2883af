"""An event loop in a thread of its own, for an engine that blocks or takes over the main thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from dynamo.runtime.background import ThreadBackground

T = TypeVar("T")
JOIN_TIMEOUT_S = 7.0
"""Time for a thread to end, with the time for its tasks."""


class EngineThread:
    """The thread lives from the first call until `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._background: ThreadBackground | None = None

    async def run(self, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` in the thread, await its result there and return it."""

        async def run() -> T:
            result = call()
            return await result if isinstance(result, Awaitable) else result

        return await self._open().run(run())

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the thread, after everything that was started before."""
        if self._background is not None:
            self._background.call_soon(call)

    def stream(
        self, start: Callable[[], Awaitable[AsyncIterator[Any]]], abort: Callable[[], object]
    ) -> ThreadStream:
        """Iterate in the thread over what `start` returns. `abort` ends it early there."""
        stream = ThreadStream(self, abort)
        self._open().submit(stream.pump(start))
        return stream

    async def close(self) -> None:
        """Cancel all streams and end the thread. A thread that the engine blocks is left alone."""
        background, self._background = self._background, None
        if background is not None:
            await background.close(JOIN_TIMEOUT_S)

    def _open(self) -> ThreadBackground:
        if self._background is None:
            self._background = ThreadBackground(self._name)
        return self._background


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
