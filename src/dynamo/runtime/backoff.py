"""How long to wait before the next restart."""

from __future__ import annotations

FIRST_S = 0.1
CAP_S = 10.0
LOOP_DEATHS = 5
"""So many deaths before it served: it crashes in a loop..."""
LOOP_CAP_S = 60.0
"""...and is tried less often."""
SERVED_S = 10.0


class Backoff:
    """The first restart comes after 0.1 s; each further one waits twice as long, up to 10 s, or 60
    where it crashes in a loop; 10 s of serving start it over."""

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self.deaths_unserved = 0

    def died(self, served_s: float) -> float:
        """The process died after serving for `served_s` (0: it never did). Seconds to wait."""
        if served_s >= SERVED_S:
            self._next_s = FIRST_S
        self.deaths_unserved = 0 if served_s > 0 else self.deaths_unserved + 1
        cap_s = LOOP_CAP_S if self.looping else CAP_S
        wait_s, self._next_s = min(self._next_s, cap_s), min(self._next_s * 2, cap_s)
        return wait_s

    @property
    def looping(self) -> bool:
        """It has died again and again before it served."""
        return self.deaths_unserved >= LOOP_DEATHS
