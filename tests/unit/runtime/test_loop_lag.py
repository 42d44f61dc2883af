"""The monitor of event-loop lag."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from types import FrameType

from dynamo.core.host.pids import catches
from dynamo.runtime import loop_lag
from dynamo.runtime.loop_lag import (
    SAMPLE_INTERVAL_S,
    STALL_S,
    GcPauseMonitor,
    LoopLagMonitor,
    describe_frame,
)
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


def test_garbage_collections_are_measured_until_the_end() -> None:
    metrics = Registry()
    monitor = GcPauseMonitor(metrics)
    callbacks = list(gc.callbacks)
    gc.collect()
    assert value(metrics, "python_gc_pause_seconds_count") == 0
    monitor.start()
    gc.collect()
    monitor.stop()
    monitor.stop()
    gc.collect()
    assert value(metrics, "python_gc_pause_seconds_count") == 1
    assert value(metrics, "python_gc_pause_seconds_sum") > 0
    assert gc.callbacks == callbacks


async def test_a_stopped_monitor_sets_no_timer() -> None:
    metrics = Registry()
    monitor = LoopLagMonitor(metrics, deque())
    monitor.start()
    monitor.stop()
    monitor.stop()
    await asyncio.sleep(2 * SAMPLE_INTERVAL_S)
    assert value(metrics, COUNT) == 0


def hold(seconds: float) -> None:
    time.sleep(seconds)


async def name_the_line() -> None:
    """Hold the loop until its line is in the log of this process."""
    lines: list[object] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.fields["at"])  # type: ignore[attr-defined, method-assign]
    logging.getLogger("dynamo.runtime.loop_lag").addHandler(handler)
    monitor = LoopLagMonitor(Registry(), deque())
    monitor.start()
    while not any("in hold" in str(line) for line in lines):
        hold(4 * STALL_S)
        await asyncio.sleep(0)
    monitor.stop()
    print(lines[-1])


def test_the_line_that_holds_the_loop_is_named() -> None:
    """In a process of its own, since the timeout of this test may have SIGALRM."""
    program = f"import asyncio, {__name__} as test; asyncio.run(test.name_the_line())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "test_loop_lag.py:" in done.stdout
    assert "in hold" in done.stdout


def test_a_frame_of_the_loop_names_no_line() -> None:
    async def frame() -> str:
        return describe_frame(sys._getframe())

    assert "test_loop_lag.py" in asyncio.run(frame())
    assert describe_frame(None) == ""


def test_a_process_that_catches_a_signal_is_known() -> None:
    assert not catches(os.getpid(), signal.SIGURG)
    before = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGURG)
    finally:
        signal.signal(signal.SIGURG, before)
    assert not catches(1 << 30, signal.SIGURG)


def test_the_monitor_is_not_what_holds_the_loop() -> None:
    names: dict[str, FrameType] = {}
    exec(compile("import sys; frame = sys._getframe()", loop_lag.__file__, "exec"), names)
    assert describe_frame(names["frame"]) == ""
