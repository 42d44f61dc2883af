"""The delays between the attempts at something that fails."""

from __future__ import annotations

from random import Random


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
