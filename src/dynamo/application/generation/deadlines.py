"""Request timeouts: one timer for all requests, which expire in the order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf, nan

from dynamo.core.clock import Clock
from dynamo.core.errors import DeadlineExceeded, InvalidRequest
from dynamo.core.settings.units import parse_seconds

TIMEOUT_HEADER = b"x-dynamo-timeout"
"""The client's own limit for the whole request, in seconds."""


def _parse_header(header: str) -> float:
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
    """The deadline of one request, after `timeout_s`. `timer`: one of its own, where the client has
    a shorter timeout. `expired`: the deadline cancelled the task, not the client."""

    __slots__ = ("expired", "expires_at", "task", "timeout_s", "timer")

    def __init__(self, task: asyncio.Task[object], now: float, timeout_s: float) -> None:
        self.task = task
        self.expires_at = now + timeout_s
        self.timeout_s = timeout_s
        self.timer: asyncio.TimerHandle | None = None
        self.expired = False

    def expire(self) -> None:
        """Cancel the task."""
        self.expired = True
        self.task.cancel()

    def raise_if_expired(self) -> None:
        """Raise `DeadlineExceeded` if the deadline caused the CancelledError being handled."""
        if self.expired:
            self.task.uncancel()
            raise DeadlineExceeded(
                f"the request took longer than {self.timeout_s:g} s",
                hint="limits: server.request_timeout and the request's x-dynamo-timeout header",
            ) from None


class Deadlines:
    """Cancels the tasks of requests that take longer than `timeout_s`, or than their clients want
    to wait."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._active: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, now: float, headers: Mapping[bytes, bytes]) -> Deadline:
        """Start the deadline of the current task at `now`. Raises `InvalidRequest`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # costs a system call each time
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline must be started in a task")
        timeout_s = self.timeout_s
        if TIMEOUT_HEADER in headers:
            timeout_s = min(timeout_s, _parse_header(headers[TIMEOUT_HEADER].decode("latin-1")))
        deadline = Deadline(task, now, timeout_s)
        if timeout_s < self.timeout_s:
            deadline.timer = self._loop.call_later(timeout_s, deadline.expire)
            return deadline
        self._active[deadline] = None
        if self._timer is None:
            self._schedule_expiry(timeout_s)
        return deadline

    def stop(self, deadline: Deadline) -> None:
        """End the deadline and drop its task, which a traceback must not keep alive."""
        self._active.pop(deadline, None)
        if deadline.timer is not None:
            deadline.timer.cancel()
        del deadline.task

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
        for deadline in list(self._active):
            if deadline.expires_at > now:
                self._schedule_expiry(deadline.expires_at - now)
                return
            del self._active[deadline]
            deadline.expire()
