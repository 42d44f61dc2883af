"""When one request's texts came, into the histograms."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from dynamo.application.frontend_metrics import ModelMetrics

MAX_PENDING_TIMESTAMPS = 64
"""So many are counted together: one by one would cost a call a token."""


class TokenTiming:
    """`times` of each choice's texts that are not counted yet, and of the last one that is. Who
    appends to them without `mark`, from the second text on, calls `count` when one is `TIMES` long.
    `events`: texts that are counted."""

    __slots__ = ("_metrics", "_started", "now", "recorded_texts", "timestamps")

    def __init__(
        self, metrics: ModelMetrics, now: Callable[[], float], started: float, choices: int
    ) -> None:
        self._metrics = metrics
        self._started = started
        self.now = now
        self.timestamps: list[list[float]] = [[] for _ in range(choices)]
        self.recorded_texts = 0

    def on_text(self, choice: int) -> None:
        """Text of `choice` came now."""
        now, times = self.now(), self.timestamps[choice]
        if not times:
            self.recorded_texts += 1
            if not any(self.timestamps):
                self._metrics.time_to_first_token.observe(now - self._started)
        times.append(now)
        if len(times) >= MAX_PENDING_TIMESTAMPS:
            self.flush()

    def flush(self) -> None:
        """Count what is not counted yet."""
        for times in self.timestamps:
            if len(times) > 1:
                self._metrics.inter_token_latency.observe_all(map(sub, times[1:], times))
                self.recorded_texts += len(times) - 1
                del times[:-1]
