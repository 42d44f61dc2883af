"""One timer for all requests: their limit is the same, so they fall due in the order they came."""

from __future__ import annotations

import asyncio
from math import inf, nan

from dynamo.core.clock import Clock
from dynamo.core.errors import DeadlineExceeded, InvalidRequest
from dynamo.core.settings.units import parse_seconds

TIMEOUT_HEADER = b"x-dynamo-timeout"
"""The client's own limit of the whole request, in seconds."""


def parse_timeout_header(header: str) -> float:
    """What a client asks for by that header, a duration as settings have them. Raises
    `InvalidRequest`."""
    try:
        seconds = parse_seconds(header)
    except ValueError:
        seconds = nan
    if not 0.0 < seconds < inf:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER.decode()} {header!r}: wanted a positive number of seconds",
            hint="e.g. 2.5, 10s or 500ms",
        )
    return seconds


class Deadline:
    """One request's limit. `expired`: its task was cancelled for it, not by the client."""

    __slots__ = ("expired", "expires_at", "task")

    def __init__(self, task: asyncio.Task[object], when: float) -> None:
        self.task = task
        self.expires_at = when
        self.expired = False


class Deadlines:
    """Cancels the task of a request that takes longer than `limit_s`."""

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self.timeout_s = limit_s
        self._clock = clock
        self._active: dict[int, Deadline] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, now: float) -> Deadline:
        """Watch the current task from `now` on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # asks the kernel, every time
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline needs a task")
        deadline = Deadline(task, now + self.timeout_s)
        self._active[id(deadline)] = deadline
        if self._timer is None:
            self._schedule_expiry(self.timeout_s)
        return deadline

    def stop(self, deadline: Deadline) -> None:
        """The task is done with it; a cancelled task's traceback must not lead back to the task."""
        self._active.pop(id(deadline), None)
        del deadline.task

    def raise_if_expired(self, deadline: Deadline) -> None:
        """In an `except CancelledError`: raise `DeadlineExceeded` if that is why."""
        if deadline.expired:
            deadline.task.uncancel()
            raise DeadlineExceeded(
                f"the request took longer than {self.timeout_s:g} s",
                hint="server.request_timeout or the request's x-dynamo-timeout is the limit",
            ) from None

    def close(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_expiry(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._cancel_expired)

    def _cancel_expired(self) -> None:
        self._timer = None
        now = self._clock.now()
        for key, deadline in list(self._active.items()):
            if deadline.expires_at > now:
                self._schedule_expiry(deadline.expires_at - now)
                return
            del self._active[key]
            deadline.expired = True
            deadline.task.cancel()
