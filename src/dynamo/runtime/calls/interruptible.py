"""An awaited call that somebody else may end with an error: `asyncio.timeout` without its timer."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Interruptible:
    """`with Interruptible(calls): await ...`; while inside it is a member of `calls`.

    `loop`: the running one, where that is known."""

    __slots__ = ("_before", "_calls", "_error", "_loop", "_task")

    def __init__(
        self, calls: set[Interruptible], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._calls = calls
        self._loop = loop
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._before = 0

    def interrupt(self, error: Exception) -> None:
        """What is awaited is cancelled, and the block raises `error`. Only the first counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task(self._loop)
        if task is not None:
            self._before = task.cancelling()
            self._calls.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls.discard(self)
        task, told = self._task, self._error
        if told is None or task is None:
            return
        ours_alone = task.uncancel() <= self._before
        if ours_alone and kind is asyncio.CancelledError:
            raise told from None
