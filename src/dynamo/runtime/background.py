"""The secondary runtime: a thread with its own event loop for leases, heartbeats and discovery I/O.
A busy primary loop therefore never loses its lease."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo.runtime.cancellation import CancellationToken

T = TypeVar("T")


class Background(ABC):
    """Runs coroutines that must not wait for the primary loop."""

    @abstractmethod
    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for its result. Cancelling the wait cancels the work."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel running work and end the loop."""


class InlineBackground(Background):
    """Runs work on the primary loop (`memory:` planes and the simulator)."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    async def close(self) -> None:
        return


class ThreadBackground(Background):
    """Runs work on a daemon thread with an asyncio event loop."""

    def __init__(self, name: str = "dynamo-background") -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` and return a future, which may be cancelled. Raises `RuntimeError` after
        `close`."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the background loop is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self.submit(work))

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the thread, after everything that was started before. Does nothing after
        `close`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancel running work and end the loop. A thread that is blocked for longer than
        `timeout_s` is left alone."""
        self.call_soon(self._closing.set)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run_loop(self) -> None:
        with self._runner:  # cancels the remaining tasks at its end
            self._runner.run(self._closing.wait())


@dataclass(eq=False)
class Runtime:
    """The loops of a process: `primary` runs requests, `secondary` heartbeats and discovery I/O.
    `cancellation_token` is cancelled when the process has to stop."""

    id: str
    primary: asyncio.AbstractEventLoop
    secondary: Background
    cancellation_token: CancellationToken
