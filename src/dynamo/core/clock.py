"""Clocks, and the delays between attempts. Code takes its time from a `Clock`, so that a simulator
can run it in virtual time."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import cache, partial
from random import Random
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OFFLOAD_THREADS = max(2, min(4, os.cpu_count() or 1))
"""Threads for `offload` in one process. A thread that has encoded a long text keeps 3 MB, so the
number is below that of `asyncio.to_thread`."""


class Clock(ABC):
    """A source of time in seconds, and of threads for long work."""

    @abstractmethod
    def now(self) -> float:
        """Return monotonic seconds."""

    @abstractmethod
    def wall(self) -> float:
        """Return Unix time in seconds."""

    @abstractmethod
    async def sleep_until(self, when: float) -> None:
        """Sleep until `now()` reaches `when`. An absolute time keeps pacing free of drift."""

    @abstractmethod
    async def offload(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking or long work off the event loop. The simulator runs it inline."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the loop when `now()` reaches `when`. Returns the canceller."""
        delay_s = max(0.0, when - self.now())
        return asyncio.get_running_loop().call_later(delay_s, callback).cancel

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        await self.sleep_until(self.now() + seconds)


class SystemClock(Clock):
    """The operating system's clocks and a thread pool."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - time.monotonic()))

    async def offload(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = partial(copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(_offload_executor(), call)


@cache
def _offload_executor() -> Executor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(OFFLOAD_THREADS, "offload")


class Backoff:
    """Doubles the delay with each attempt, from `first_s` up to `max_s`. `jitter` is the share of
    each delay that is random."""

    def __init__(self, first_s: float, max_s: float, jitter: float = 0.0) -> None:
        self.max_s = max_s
        self._first_s = self._delay_s = first_s
        self._jitter = jitter

    def next_s(self, rng: Random | None = None) -> float:
        """Return the seconds to wait now. `rng` draws the part that is random."""
        delay_s = min(self._delay_s, self.max_s)
        self._delay_s = min(2 * self._delay_s, self.max_s)
        if rng is not None:
            delay_s *= 1 - self._jitter + self._jitter * rng.random()
        return delay_s

    def reset(self) -> None:
        """Begin again at the first delay, after a success."""
        self._delay_s = self._first_s
