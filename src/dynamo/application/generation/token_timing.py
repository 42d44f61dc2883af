"""Token timing of one request: time to first token and inter-token latency."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from dynamo.application.frontend_metrics import ModelMetrics

MAX_PENDING_TIMESTAMPS = 64
"""Intervals are recorded in batches of this size, to save a call for each token."""


class TokenTiming:
    """Records when the texts of one request are written.

    `timestamps` holds, for each choice, the last recorded time and the times after it. The fast
    path appends to them without `on_text`, from the second text on, and calls `flush` when a list
    has MAX_PENDING_TIMESTAMPS entries. `recorded_texts` counts the texts that are recorded.
    """

    __slots__ = ("_metrics", "_started", "now", "recorded_texts", "timestamps")

    def __init__(
        self, metrics: ModelMetrics, now: Callable[[], float], started: float, choices: int
    ) -> None:
        self._metrics = metrics
        self._started = started
        self.now = now
        self.timestamps: list[list[float]] = list(map(list, [()] * choices))
        self.recorded_texts = 0

    def on_text(self, choice: int) -> None:
        """Note that text of `choice` is written now."""
        now, timestamps = self.now(), self.timestamps[choice]
        if not timestamps:
            self.recorded_texts += 1
            if not any(self.timestamps):
                self._metrics.time_to_first_token.observe(now - self._started)
        timestamps.append(now)
        if len(timestamps) >= MAX_PENDING_TIMESTAMPS:
            self.flush()

    def flush(self) -> None:
        """Record all intervals that are not recorded yet."""
        for timestamps in self.timestamps:
            if len(timestamps) > 1:
                intervals = map(sub, timestamps[1:], timestamps)
                self._metrics.inter_token_latency.observe_all(intervals)
                self.recorded_texts += len(timestamps) - 1
                del timestamps[:-1]
