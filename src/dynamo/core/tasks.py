"""The one home of `create_task` and `gather`: every task has an owner, every failure is heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class BackgroundTasks:
    """Owns background tasks: `async with Tasks() as tasks`, or `close()`.

    A task that fails is logged and dropped, unless `on_failure` is given. Closing cancels what is
    left and waits for it.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run `work` under this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def start_self_removing(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """`start` for work that nobody need hear the end of, and that calls `over` as its last
        act: its end then costs the loop no turn. Only `drop` may cancel it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # asks the kernel, every time
        task = self._loop.create_task(work)
        self._tasks.add(task)
        return task

    def discard(self, task: asyncio.Task[Any]) -> None:
        """What `run` began is at its end."""
        self._tasks.discard(task)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel what `run` began, which may not have had its first turn."""
        task.add_done_callback(self._tasks.discard)
        task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    async def join(self) -> None:
        """Wait until every task has ended by itself."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        mine = asyncio.current_task()
        pending = [task for task in self._tasks if task is not mine]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
            self._tasks.difference_update(pending)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_failure is not None:
            self._on_failure(error)
        else:
            fields = {"task": task.get_name()}
            log.error("background task failed", exc_info=error, extra={"fields": fields})


async def run_all(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all side by side; the first failure cancels the rest and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def wait_for_first(*waits: Awaitable[Any]) -> None:
    """Return when the first is done (or raise its error); the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()
