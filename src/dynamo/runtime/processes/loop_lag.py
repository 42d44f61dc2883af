"""Measures the lag of the event loop, including pauses for garbage collection."""

from __future__ import annotations

import asyncio
import time

from dynamo.telemetry import Registry

SAMPLE_INTERVAL_S = 0.02
IDLE_SAMPLE_INTERVAL_S = 0.25
"""Waking an idle process costs 0.1 ms of CPU, so samples are rarer then."""
IDLE_CPU_SHARE = 0.02
"""A process that uses less of a core than this is idle."""
LAG_BUCKETS_S = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class LoopLagMonitor:
    """Samples the delay of a timer 50 times a second, or 4 times a second in an idle process. The
    delay is the time that any event at that moment had to wait. The loop's timers have a resolution
    of one millisecond, so an idle loop shows up to 1 ms."""

    def __init__(self, metrics: Registry) -> None:
        histogram = metrics.histogram(
            "dynamo_runtime_loop_pause_seconds",
            "Lag of the event loop, sampled 50 times a second while the process is busy",
            LAG_BUCKETS_S,
        )
        self._observe = histogram.observe
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._cpu_s = 0.0

    def start(self) -> None:
        """Start to sample the running loop."""
        self._loop = asyncio.get_running_loop()
        self._cpu_s = time.process_time()
        self._schedule(SAMPLE_INTERVAL_S)

    def stop(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, wait_s: float) -> None:
        self._interval_s = wait_s
        self._due_at = time.monotonic() + wait_s
        self._timer = self._loop.call_later(wait_s, self._sample)

    def _sample(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_at)
        self._observe(late_s)
        cpu_s = time.process_time()
        idle = cpu_s - self._cpu_s < IDLE_CPU_SHARE * (self._interval_s + late_s)
        self._cpu_s = cpu_s
        self._schedule(IDLE_SAMPLE_INTERVAL_S if idle else SAMPLE_INTERVAL_S)
