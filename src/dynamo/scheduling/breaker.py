"""A circuit breaker as a pure state machine: closed, open, half open."""

from __future__ import annotations

from random import Random

ONE_INCIDENT_S = 0.1
"""Requests that fail so close together failed of one cause."""
FIRST_OPEN_S = 1.0
LONGEST_OPEN_S = 30.0


class Breaker:
    """One instance's. It opens after `threshold` failures in a row; a success between them closes
    it; half open, one failure opens it again, for twice as long."""

    __slots__ = ("_last", "_openings", "_threshold", "failures", "half_open", "open")

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._last = -ONE_INCIDENT_S
        self._openings = 0
        self.failures = 0
        self.open = False
        self.half_open = False

    def succeeded(self) -> None:
        """A request was answered, which says that all is well."""
        self.failures = 0
        if self.half_open:
            self.half_open = False
            self._openings = 0

    def failed(self, now: float) -> bool:
        """A request failed. True: enough is enough, it is to be opened."""
        if self.open or now - self._last < ONE_INCIDENT_S:
            return False
        self._last = now
        self.failures += 1
        return self.half_open or self.failures >= self._threshold

    def opened(self, rng: Random) -> float:
        """Nothing is sent now. Seconds until it is tried: doubling, with jitter."""
        self.open, self.half_open = True, False
        bound = min(FIRST_OPEN_S * 2.0**self._openings, LONGEST_OPEN_S)
        self._openings = min(self._openings + 1, 16)
        return bound * (0.5 + 0.5 * rng.random())

    def tried(self) -> None:
        """A probe was answered: requests may come again."""
        self.open, self.half_open = False, True
        self.failures = 0
