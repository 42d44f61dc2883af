"""Request timeouts: one timer for all requests, which expire in the order of arrival."""

from __future__ import annotations

import asyncio
from math import inf, nan

from dynamo.core.clock import Clock
from dynamo.core.errors import DeadlineExceeded, InvalidRequest
from dynamo.core.settings.units import parse_seconds

TIMEOUT_HEADER = b"x-dynamo-timeout"
"""The client's own limit for the whole request, in seconds."""


def parse_timeout_header(header: str) -> float:
    """Parse a timeout header, a duration like in settings. Raises `InvalidRequest`."""
    try:
        seconds = parse_seconds(header)
    except ValueError:
        seconds = nan
    if not 0.0 < seconds < inf:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER.decode()} {header!r}: expected a positive number of seconds",
            hint="e.g. 2.5, 10s or 500ms",
        )
    return seconds


class Deadline:
    """The deadline of one request. `number` is unique within its `Deadlines`.

    `expired`: the deadline cancelled the task, not the client.
    """

    __slots__ = ("expired", "expires_at", "number", "task")

    def __init__(self, number: int, task: asyncio.Task[object], expires_at: float) -> None:
        self.number = number
        self.task = task
        self.expires_at = expires_at
        self.expired = False


class Deadlines:
    """Cancels the tasks of requests that take longer than `timeout_s`."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._active: dict[int, Deadline] = {}
        self._last_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, now: float) -> Deadline:
        """Start the deadline of the current task at `now`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # costs a system call each time
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline must be started in a task")
        number = self._last_number = self._last_number + 1
        deadline = self._active[number] = Deadline(number, task, now + self.timeout_s)
        if self._timer is None:
            self._schedule_expiry(self.timeout_s)
        return deadline

    def stop(self, deadline: Deadline) -> None:
        """End the deadline and drop its task, which a traceback must not keep alive."""
        self._active.pop(deadline.number, None)
        del deadline.task

    def raise_if_expired(self, deadline: Deadline) -> None:
        """Raise `DeadlineExceeded` if the deadline caused the CancelledError being handled."""
        if deadline.expired:
            deadline.task.uncancel()
            raise DeadlineExceeded(
                f"the request took longer than {self.timeout_s:g} s",
                hint="limits: server.request_timeout and the request's x-dynamo-timeout header",
            ) from None

    def close(self) -> None:
        """Cancel the timer."""
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
