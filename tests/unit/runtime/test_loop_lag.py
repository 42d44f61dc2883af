"""The monitor of event-loop lag."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from dynamo.runtime.loop_lag import SAMPLE_INTERVAL_S, STALL_S, LoopLagMonitor
from dynamo.telemetry import Registry

SUM = "dynamo_runtime_loop_pause_seconds_sum"
COUNT = "dynamo_runtime_loop_pause_seconds_count"


def value(metrics: Registry, name: str) -> float:
    (line,) = [line for line in metrics.render().splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


async def test_a_blocked_loop_is_measured() -> None:
    metrics = Registry()
    pauses: deque[tuple[float, float]] = deque()
    monitor = LoopLagMonitor(metrics, pauses)
    monitor.start()
    time.sleep(SAMPLE_INTERVAL_S + 1.1 * STALL_S)
    while not value(metrics, COUNT):
        await asyncio.sleep(0)
    monitor.stop()
    assert value(metrics, SUM) >= STALL_S
    ((_, seconds),) = pauses
    assert seconds >= STALL_S


async def test_a_stopped_monitor_sets_no_timer() -> None:
    metrics = Registry()
    monitor = LoopLagMonitor(metrics, deque())
    monitor.start()
    monitor.stop()
    monitor.stop()
    await asyncio.sleep(2 * SAMPLE_INTERVAL_S)
    assert value(metrics, COUNT) == 0
