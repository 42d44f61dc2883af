"""The watchdog of the supervisor: finds children whose event loops hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo.core.clock import Clock

PING_INTERVAL_S = 0.5
HUNG_AFTER_S = 2.0
"""A child that has not answered a ping for this time is reported as hung."""
KILL_AFTER_S = 5.0
"""A child that has not answered a ping for this time is killed."""
MAX_LATENESS_S = 1.0
"""A tick that is later than this restarts the waits: the supervisor itself did not run."""


class Watchdog:
    """Measures how long the event loop of one process leaves a ping unanswered.

    The process is watched from its first answer, which it sends without a ping. `silent_s` counts
    whole ticks in which the supervisor ran. So neither a stopped nor a slow supervisor counts time
    in which it could not read answers.
    """

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._watched = False
        self._unanswered = False
        self._due_at = 0.0

    @property
    def hung(self) -> bool:
        """Whether the process has not answered for `HUNG_AFTER_S`."""
        return self.silent_s >= HUNG_AFTER_S

    @property
    def expired(self) -> bool:
        """Whether the process has to be killed."""
        return self.silent_s >= KILL_AFTER_S

    def on_answer(self) -> bool:
        """Record an answer, by which the process also asks to be watched. Returns whether it hung
        until now."""
        was_hung, self._watched = self.hung, True
        self._unanswered = False
        self.silent_s = 0.0
        return was_hung

    def tick(self, now: float) -> bool:
        """Count a tick. Returns True if a ping has to be sent. Call it every `PING_INTERVAL_S`."""
        if not self._watched:
            return False
        late = self._due_at and now - self._due_at > MAX_LATENESS_S
        self._due_at = now + PING_INTERVAL_S
        if not self._unanswered:
            self._unanswered = True
            return True
        self.silent_s = 0.0 if late else self.silent_s + PING_INTERVAL_S
        return False


class WatchedChild(Protocol):
    """A child that counts a tick of its watchdog at each call."""

    def check_event_loop(self) -> None:
        """Ping the process, or kill it if it hangs."""


async def watch_children(children: Sequence[WatchedChild], clock: Clock) -> None:
    """Check all children every `PING_INTERVAL_S`, until cancelled."""
    while True:
        await clock.sleep(PING_INTERVAL_S)
        for child in tuple(children):
            child.check_event_loop()
