"""A circuit breaker as a pure state machine: closed, open, half open."""

from __future__ import annotations

from random import Random

SAME_INCIDENT_S = 0.1
"""Requests that fail so close together failed of one cause."""
INITIAL_OPEN_S = 1.0
MAX_OPEN_S = 30.0


class Breaker:
    """One instance's. It opens after `threshold` failures in a row; a success between them closes
    it; half open, one failure opens it again, for twice as long."""

    __slots__ = (
        "_consecutive_trips",
        "_last_failure_s",
        "_threshold",
        "consecutive_failures",
        "half_open",
        "open",
    )

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._last_failure_s = -SAME_INCIDENT_S
        self._consecutive_trips = 0
        self.consecutive_failures = 0
        self.open = False
        self.half_open = False

    def record_success(self) -> None:
        """A request was answered, which says that all is well."""
        self.consecutive_failures = 0
        if self.half_open:
            self.half_open = False
            self._consecutive_trips = 0

    def record_failure(self, now: float) -> bool:
        """A request failed. True: enough is enough, it is to be opened."""
        if self.open or now - self._last_failure_s < SAME_INCIDENT_S:
            return False
        self._last_failure_s = now
        self.consecutive_failures += 1
        return self.half_open or self.consecutive_failures >= self._threshold

    def trip(self, rng: Random) -> float:
        """Nothing is sent now. Seconds until it is tried: doubling, with jitter."""
        self.open, self.half_open = True, False
        bound = min(INITIAL_OPEN_S * 2.0**self._consecutive_trips, MAX_OPEN_S)
        self._consecutive_trips = min(self._consecutive_trips + 1, 16)
        return bound * (0.5 + 0.5 * rng.random())

    def enter_half_open(self) -> None:
        """A probe was answered: requests may come again."""
        self.open, self.half_open = False, True
        self.consecutive_failures = 0
