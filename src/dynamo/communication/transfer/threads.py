"""Threads that copy bytes: a cancelled caller continues when its thread has stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class CopyThreads:
    """A pool of threads, started on demand."""

    def __init__(self, name: str, limit: int) -> None:
        self._executor = ThreadPoolExecutor(limit, name)

    async def run(self, work: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """Run `work` in a thread. A cancellation calls `stop`, and is raised after `work` ended.
        Without `stop`, the work has to end by itself soon."""
        return await wait_for_job(self._executor.submit(work), stop)

    def close(self) -> None:
        """Start no more work. Threads end with their present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


async def wait_for_job(job: Future[T], stop: Callable[[], None] | None = None) -> T:
    """Return the result of a thread. A cancellation calls `stop`, and is raised after the end."""
    future = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not job.cancel() and stop is not None:
            stop()
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # counts as seen
        raise
