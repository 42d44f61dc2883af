"""The loop's pauses, measured."""

from __future__ import annotations

import asyncio
import time

from dynamo.runtime.processes.loop_lag import SAMPLE_INTERVAL_S, LoopLagMonitor
from dynamo.telemetry import Registry

SUM = "dynamo_runtime_loop_pause_seconds_sum"
COUNT = "dynamo_runtime_loop_pause_seconds_count"


def value(metrics: Registry, name: str) -> float:
    (line,) = [line for line in metrics.render().splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


async def test_a_blocked_loop_is_seen() -> None:
    metrics = Registry()
    pauses = LoopLagMonitor(metrics)
    pauses.start()
    time.sleep(SAMPLE_INTERVAL_S + 0.05)
    while not value(metrics, COUNT):
        await asyncio.sleep(0)
    pauses.stop()
    assert value(metrics, SUM) >= 0.05


async def test_stopped_it_arms_no_timer() -> None:
    metrics = Registry()
    pauses = LoopLagMonitor(metrics)
    pauses.start()
    pauses.stop()
    pauses.stop()
    await asyncio.sleep(2 * SAMPLE_INTERVAL_S)
    assert value(metrics, COUNT) == 0
