"""An event loop whose clock jumps: whatever runs on it takes no longer than its computing.

When nothing is left to do at an instant, time moves to the next timer at once. The order of
things depends on the program alone, so the same program with the same seed does the same.
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
    """Everybody waits and no timer is left: it would never go on."""


class VirtualTimeSelector(selectors.SelectSelector):
    """Waits for nothing: to select for so many seconds is to be so much later."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idle_callbacks: list[Callable[[], None]] = []
        """Called once when nothing is left to do at this instant."""
        self.on_time_advanced: Callable[[], None] | None = None
        """Called whenever the clock has moved."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """No file is ever ready. Raises `Deadlock` for a wait without an end."""
        if timeout is not None and timeout <= 0:
            return []
        if self.idle_callbacks:
            waiting, self.idle_callbacks = self.idle_callbacks, []
            for callback in waiting:
                callback()
        elif timeout is None:
            raise Deadlock(f"at {self.now:.3f} s of virtual time all wait for each other")
        else:
            self.now += timeout
            if self.on_time_advanced is not None:
                self.on_time_advanced()
        return []


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """A standard loop on virtual time, which starts at 0. No sockets, threads or signals."""

    def __init__(self) -> None:
        self.time_selector = VirtualTimeSelector()
        super().__init__(self.time_selector)

    def time(self) -> float:
        return self.time_selector.now


class VirtualClock(Clock):
    """The time of a `VirtualLoop`. What is offloaded runs at once and takes no time."""

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
        """Call `callback` whenever the time has moved, before anything else happens then."""
        self._time_selector.on_time_advanced = callback

    async def wait_until_idle(self) -> None:
        """Return when all else that happens at this instant has happened."""
        quiet = asyncio.get_running_loop().create_future()
        self._time_selector.idle_callbacks.append(lambda: quiet.set_result(None))
        await quiet


def run_in_virtual_time(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a loop of its own to its end. Raises `Deadlock`, and what `main` raises."""
    with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
        return runner.run(main(VirtualClock(cast("VirtualEventLoop", runner.get_loop()))))
