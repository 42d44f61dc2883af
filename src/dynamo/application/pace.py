"""When one request's texts came, into the histograms."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from dynamo.application.metrics import ModelMetrics

TIMES = 64
"""So many are counted together: one by one would cost a call a token."""


class Pace:
    """`times` of each choice's texts that are not counted yet, and of the last one that is. Who
    appends to them without `mark`, from the second text on, calls `count` when one is `TIMES` long.
    `events`: texts that are counted."""

    __slots__ = ("_metrics", "_started", "events", "now", "times")

    def __init__(
        self, metrics: ModelMetrics, now: Callable[[], float], started: float, choices: int
    ) -> None:
        self._metrics = metrics
        self._started = started
        self.now = now
        self.times: list[list[float]] = [[] for _ in range(choices)]
        self.events = 0

    def mark(self, choice: int) -> None:
        """Text of `choice` came now."""
        now, times = self.now(), self.times[choice]
        if not times:
            self.events += 1
            if not any(self.times):
                self._metrics.first_token.observe(now - self._started)
        times.append(now)
        if len(times) >= TIMES:
            self.count()

    def count(self) -> None:
        """Count what is not counted yet."""
        for times in self.times:
            if len(times) > 1:
                self._metrics.inter_token.observe_each(map(sub, times[1:], times))
                self.events += len(times) - 1
                del times[:-1]
