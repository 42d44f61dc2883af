"""The delay between the death of a child and its restart."""

from __future__ import annotations

from dynamo.core.clock import Backoff

RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 10.0
CRASH_LOOP_DEATHS = 5
"""A child that died this many times in a row before it served is in a crash loop."""
CRASH_LOOP_MAX_DELAY_S = 60.0
BACKOFF_RESET_S = 10.0
"""A child that served for this time is restarted at once, later with `RESTART_DELAY_S` again."""


class RestartBackoff:
    """Computes the restart delay, whose limit is higher in a crash loop."""

    def __init__(self) -> None:
        self._backoff = Backoff(RESTART_DELAY_S, MAX_RESTART_DELAY_S)
        self.deaths_before_ready = 0

    def next_delay_s(self, served_s: float) -> float:
        """Record a death after serving for `served_s` (0: never). Returns the seconds to wait."""
        if served_s >= BACKOFF_RESET_S:
            self.deaths_before_ready = 0
            self._backoff.reset()
            return 0.0
        self.deaths_before_ready = 0 if served_s > 0 else self.deaths_before_ready + 1
        self._backoff.max_s = CRASH_LOOP_MAX_DELAY_S if self.crash_looping else MAX_RESTART_DELAY_S
        return self._backoff.next_s()

    @property
    def crash_looping(self) -> bool:
        """Whether the process repeatedly died before it served."""
        return self.deaths_before_ready >= CRASH_LOOP_DEATHS
