"""How long the event loop keeps others waiting, garbage collection included."""

from __future__ import annotations

import asyncio
import time

from dynamo.telemetry import Registry

EVERY_S = 0.02
BUCKETS = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class LoopPauses:
    """A timer 50 times a second; how late it comes is how long anything that arrived then had to
    wait. (Timers of the loop count whole milliseconds: an idle loop shows up to one.)"""

    def __init__(self, metrics: Registry) -> None:
        pauses = metrics.histogram(
            "dynamo_runtime_loop_pause_seconds",
            "How late the event loop was, looked at 50 times a second",
            BUCKETS,
        )
        self._observe = pauses.observe
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Measure the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._due = time.monotonic() + EVERY_S
        self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._observe(max(0.0, time.monotonic() - self._due))
        self._arm()
