"""How long to wait before the next restart."""

from __future__ import annotations

RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 10.0
CRASH_LOOP_DEATHS = 5
"""So many deaths before it served: it crashes in a loop..."""
CRASH_LOOP_MAX_DELAY_S = 60.0
"""...and is tried less often."""
BACKOFF_RESET_S = 10.0


class RestartBackoff:
    """The first restart comes after 0.1 s; each further one waits twice as long, up to 10 s, or 60
    where it crashes in a loop; 10 s of serving start it over."""

    def __init__(self) -> None:
        self._delay_s = RESTART_DELAY_S
        self.deaths_before_ready = 0

    def next_delay_s(self, served_s: float) -> float:
        """The process died after serving for `served_s` (0: it never did). Seconds to wait."""
        if served_s >= BACKOFF_RESET_S:
            self._delay_s = RESTART_DELAY_S
        self.deaths_before_ready = 0 if served_s > 0 else self.deaths_before_ready + 1
        cap_s = CRASH_LOOP_MAX_DELAY_S if self.crash_looping else MAX_RESTART_DELAY_S
        wait_s, self._delay_s = min(self._delay_s, cap_s), min(self._delay_s * 2, cap_s)
        return wait_s

    @property
    def crash_looping(self) -> bool:
        """It has died again and again before it served."""
        return self.deaths_before_ready >= CRASH_LOOP_DEATHS
