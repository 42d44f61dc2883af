"""Interrupts awaited calls with an error, like `asyncio.timeout` without a timer."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Interruptible:
    """A context manager: `with Interruptible(calls): await ...`. The object is a key of `calls`
    inside the `with` statement. `loop` is the running loop; passing it saves a lookup."""

    __slots__ = ("_calls", "_cancels_before", "_error", "_loop", "_task")

    def __init__(
        self, calls: dict[Interruptible, None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._calls = calls
        self._loop = loop
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancels_before = 0

    def interrupt(self, error: Exception) -> None:
        """Cancel the awaited call; the `with` statement raises `error`. Only the first interrupt
        counts."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task(self._loop)
        if task is not None:
            self._cancels_before = task.cancelling()
            self._calls[self] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._calls.pop(self, None)
        task, interrupt_error = self._task, self._error
        if interrupt_error is None or task is None:
            return
        only_interrupted = task.uncancel() <= self._cancels_before
        if only_interrupted and kind is asyncio.CancelledError:
            raise interrupt_error from None
