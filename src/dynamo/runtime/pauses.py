"""How long the event loop keeps others waiting, garbage collection included."""

from __future__ import annotations

import asyncio
import time

from dynamo.telemetry import Registry

EVERY_S = 0.02
IDLE_S = 0.25
"""Waking an idle process costs 0.1 ms of CPU, so it is looked at less often."""
IDLE_SHARE = 0.02
"""A process that uses less of a core than this is idle."""
BUCKETS = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class LoopPauses:
    """A timer 50 times a second, 4 times where the process is idle; how late it comes is how long
    anything that arrived then had to wait. (Timers of the loop count whole milliseconds: an idle
    loop shows up to one.)"""

    def __init__(self, metrics: Registry) -> None:
        pauses = metrics.histogram(
            "dynamo_runtime_loop_pause_seconds",
            "How late the event loop was, looked at 50 times a second while it works",
            BUCKETS,
        )
        self._observe = pauses.observe
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._worked = 0.0

    def start(self) -> None:
        """Measure the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._worked = time.process_time()
        self._arm(EVERY_S)

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._due = time.monotonic() + wait_s
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due)
        self._observe(late_s)
        worked = time.process_time()
        idle = worked - self._worked < IDLE_SHARE * (self._wait_s + late_s)
        self._worked = worked
        self._arm(IDLE_S if idle else EVERY_S)
