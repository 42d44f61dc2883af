"""`CopyPool`: threads that copy a row of blocks and report how many leading ones are done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dynamo.communication.transfer.threads import CopyThreads


class CopyPool:
    """Up to `threads` threads, started on demand. Several rows can be copied at once."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = threads
        self._callers = CopyThreads(f"{name}-row", threads)
        self._executor = ThreadPoolExecutor(threads, name)
        self._rows = 0
        self._is_idle = asyncio.Event()

    async def run(
        self,
        count: int,
        copy: Callable[[int], None],
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Call `copy(0)` to `copy(count - 1)` in threads. `on_progress(n)` is called on the event
        loop when the first n are done. After an error of `copy(n)` those before n are done, and the
        error is raised. After the return, an error or a cancellation no copy is in progress."""
        row = _Row(count, copy, on_progress, asyncio.get_running_loop())
        self._rows += 1
        try:
            await self._callers.run(lambda: self._copy_row(row), row.stop)
        finally:
            row.finish()
            self._rows -= 1
            self._is_idle.set()
        if row.error is not None:
            raise row.error

    async def close(self) -> None:
        """Wait for the copies in progress and end the threads."""
        while self._rows:
            self._is_idle.clear()
            await self._is_idle.wait()
        self._callers.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _copy_row(self, row: _Row) -> None:
        extra: list[Future[None]] = []
        try:
            for _ in range(min(self._threads, row.count) - 1):
                extra += [self._executor.submit(row.copy_next)]
            row.copy_next()
        finally:
            for future in extra:
                if not future.cancel():
                    future.exception()  # waits


class _Row:
    """The copies of one call, taken in order by several threads."""

    def __init__(
        self,
        count: int,
        copy: Callable[[int], None],
        on_progress: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.count = count
        self.error: BaseException | None = None
        self._end = count
        self._copy = copy
        self._on_progress = on_progress
        self._loop = loop
        self._lock = threading.Lock()
        self._next = 0
        self._done = bytearray(count + 1)
        self._progress = 0
        self._reported = 0
        self._stopped = False
        self._finished = False

    def stop(self) -> None:
        """Start no further copy."""
        self._stopped = True

    def finish(self) -> None:
        """Report the progress that the loop has not seen yet, and none afterwards."""
        if not self._stopped:
            self._report(self._progress)
        self._finished = True

    def copy_next(self) -> None:
        """Copy until nothing is left."""
        while True:
            with self._lock:
                number = self._next
                if self._stopped or number >= self._end:
                    return
                self._next += 1
            try:
                self._copy(number)
            except BaseException as error:  # noqa: BLE001 raised by `CopyPool.run`
                with self._lock:
                    if number < self._end:
                        self._end, self.error = number, error
                return
            self._mark_done(number)

    def _mark_done(self, number: int) -> None:
        with self._lock:
            self._done[number] = 1
            if number != self._progress:
                return
            self._progress = self._done.index(0, number)
            progress = self._progress
        if progress < self.count:
            self._loop.call_soon_threadsafe(self._report, progress)

    def _report(self, progress: int) -> None:
        if progress > self._reported and not self._finished:
            self._reported = progress
            self._on_progress(progress)
