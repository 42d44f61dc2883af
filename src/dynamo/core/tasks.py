"""Tasks with owners. Only this module calls `create_task` and `ensure_future`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class BackgroundTasks:
    """Owns background tasks. Use it as an async context manager, or call `close`.

    Failures go to `on_failure`, else to the log. Closing cancels the remaining tasks.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run `work` as a task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def start_self_removing(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work`, which must call `discard` with its task as its last action.

        This saves the loop iteration of a done callback. Failures are not reported.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # costs a getpid system call each time
        task = self._loop.create_task(work)
        self._tasks[task] = None
        return task

    def discard(self, task: asyncio.Task[Any]) -> None:
        """Forget a task of `start_self_removing` that ends."""
        self._tasks.pop(task, None)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of `start_self_removing`, which may not have run yet."""
        task.add_done_callback(self.discard)
        task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    async def join(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel the remaining tasks, except the calling one, and wait for them."""
        current = asyncio.current_task()
        pending = [task for task in self._tasks if task is not current]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
            for task in pending:
                self._tasks.pop(task, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            fields = {"task": task.get_name()}
            log.error("background task failed", exc_info=error, extra={"fields": fields})


async def run_all(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all concurrently. The first failure cancels the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def run_in_slices(work: Iterable[Coroutine[Any, Any, object]], size: int) -> None:
    """Run all like `run_all`, but start at most `size` in one iteration of the event loop."""
    try:
        async with asyncio.TaskGroup() as group:
            for number, coroutine in enumerate(work, 1):
                group.create_task(coroutine)
                if not number % size:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def wait_at_most(wait: Awaitable[Any], seconds: float | None) -> None:
    """Return when `wait` is done, which may raise, or after `seconds` (None: no limit)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wait


async def wait_for_first(*waits: Awaitable[Any]) -> None:
    """Return when the first is done, or raise its error. The others are cancelled. Of several that
    end in the same iteration of the event loop, the earliest argument with an error counts."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if task in done:
            task.result()
