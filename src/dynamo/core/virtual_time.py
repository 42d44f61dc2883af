"""An event loop in virtual time: timers cost no waiting, only computation takes real time.

When no callback is left at an instant, the clock jumps to the next timer. The order of callbacks
depends on the program alone, so a program with the same seed repeats exactly.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from dynamo.core.clock import Clock, P
from dynamo.core.errors import InternalError

T = TypeVar("T")


class Deadlock(InternalError):
    """All tasks wait and no timer is left."""


class VirtualTimeSelector(selectors.SelectSelector):
    """Advances `now` by the timeout instead of waiting.

    `idle_callbacks` are called once when nothing is left to do at the present instant.
    `on_time_advanced` is called whenever the clock has moved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idle_callbacks: list[Callable[[], None]] = []
        self.on_time_advanced: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return no ready file. Raises `Deadlock` where no timer is left."""
        if timeout is not None and timeout <= 0:
            return []
        if self.idle_callbacks:
            callbacks, self.idle_callbacks = self.idle_callbacks, []
            for callback in callbacks:
                callback()
        elif timeout is None:
            raise Deadlock(f"deadlock at {self.now:.3f} s of virtual time: all tasks wait")
        else:
            self.now += timeout
            if self.on_time_advanced is not None:
                self.on_time_advanced()
        return []


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time from 0. Sockets, threads and signals do not work on it."""

    def __init__(self) -> None:
        self.time_selector = VirtualTimeSelector()
        super().__init__(self.time_selector)

    def time(self) -> float:
        return self.time_selector.now


class VirtualClock(Clock):
    """The time of a `VirtualEventLoop`. Offloaded work runs inline and takes no virtual time."""

    def __init__(self, loop: VirtualEventLoop) -> None:
        self._time_selector = loop.time_selector

    def now(self) -> float:
        return self._time_selector.now

    def wall(self) -> float:
        return self._time_selector.now

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._time_selector.now))

    async def offload(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return work(*args, **kwargs)

    def on_time_advanced(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever time has moved, before any timer of the new instant."""
        self._time_selector.on_time_advanced = callback

    async def wait_until_idle(self) -> None:
        """Return when no other callback is left at the present instant."""
        idle = asyncio.Event()
        self._time_selector.idle_callbacks.append(idle.set)
        await idle.wait()


def run_in_virtual_time(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on a new loop. Raises `Deadlock` and the exceptions of `main`."""
    with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
        return runner.run(main(VirtualClock(cast("VirtualEventLoop", runner.get_loop()))))
