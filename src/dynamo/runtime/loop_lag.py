"""The lag of a process's event loop, as a metric."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from dynamo.telemetry import Registry

SAMPLE_INTERVAL_S = 0.02
MAX_SAMPLE_INTERVAL_S = 0.25
CPU_S_PER_SAMPLE = 0.005
"""A sample costs 0.1 ms of CPU in a process that sleeps, so it comes with 5 ms of other work."""
STALL_S = 0.1
"""A longer lag is a stall, which users see as a pause of all answers."""
LAG_BUCKETS_S = (
    0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class LoopLagMonitor:
    """Samples the delay of a timer 4 to 50 times a second, the more often the busier the process
    is. The delay is the time that any event at that moment had to wait. The loop's timers have a
    resolution of one millisecond, so an idle loop shows up to 1 ms."""

    def __init__(self, metrics: Registry, pauses: deque[tuple[float, float]]) -> None:
        """Pauses above `STALL_S` are added to `pauses`: (Unix time of the end, seconds)."""
        self._pauses = pauses
        histogram = metrics.histogram(
            "dynamo_runtime_loop_pause_seconds",
            "Lag of the event loop, sampled up to 50 times a second while the process is busy",
            LAG_BUCKETS_S,
        )
        self._observe = histogram.observe
        self._stalls = metrics.counter(
            "dynamo_loop_stalls_total",
            "Times that the event loop was held for more than 100 ms",
        )
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
        if late_s > STALL_S:
            self._stalls.inc()
            self._pauses.append((time.time(), late_s))
        cpu_s = time.process_time()
        share = max(1e-3, (cpu_s - self._cpu_s) / (self._interval_s + late_s))
        self._cpu_s = cpu_s
        self._schedule(min(MAX_SAMPLE_INTERVAL_S, max(SAMPLE_INTERVAL_S, CPU_S_PER_SAMPLE / share)))
