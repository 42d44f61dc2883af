"""The lag of a process's event loop, and its pauses by Python's garbage collector, as metrics; and
the lines of code that hold the loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections import deque
from contextlib import suppress
from math import inf
from types import FrameType

from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

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


LOG_INTERVAL_S = 60.0
"""A line that holds the loop is logged this often at most."""
MAX_NAMED_LINES = 64
_NO_CODE = "no line: the process waited for a core, or was stopped"
_LOOP_FILES = (
    *("asyncio/", "uvloop/", "runtime/processes/process.py", "runtime/loop_lag.py"),
    "<frozen ",
)


class LoopLagMonitor:
    """Samples the delay of a timer 4 to 50 times a second, the more often the busier the process
    is. The delay is the time that any event at that moment had to wait. The loop's timers have a
    resolution of one millisecond, so an idle loop shows up to 1 ms. A timer of the system
    interrupts code that holds the loop for longer than `STALL_S`: the log names its line."""

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
        self._has_alarm = False
        self._held_at = ""
        self._logged: dict[str, float] = {}

    def start(self) -> None:
        """Start to sample the running loop. Lines are named in the main thread of a process that
        uses SIGALRM for nothing else."""
        self._loop = asyncio.get_running_loop()
        self._cpu_s = time.process_time()
        with suppress(ValueError):  # another thread
            if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
                signal.signal(signal.SIGALRM, self._on_alarm)
                signal.siginterrupt(signal.SIGALRM, False)
                self._has_alarm = True
        self._schedule(SAMPLE_INTERVAL_S)

    def stop(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            self._has_alarm = False

    def _schedule(self, wait_s: float) -> None:
        self._interval_s = wait_s
        self._due_at = time.monotonic() + wait_s
        self._timer = self._loop.call_later(wait_s, self._sample)
        if self._has_alarm:
            signal.setitimer(signal.ITIMER_REAL, wait_s + STALL_S)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        """Remember the line that holds the loop. Python calls this between two instructions."""
        del number
        self._held_at = describe_frame(frame)

    def _sample(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_at)
        self._observe(late_s)
        cpu_s = time.process_time()
        if late_s > STALL_S:
            self._stalls.inc()
            self._pauses.append((time.time(), late_s))
            self._report(late_s)
        share = max(1e-3, (cpu_s - self._cpu_s) / (self._interval_s + late_s))
        self._cpu_s = cpu_s
        self._schedule(min(MAX_SAMPLE_INTERVAL_S, max(SAMPLE_INTERVAL_S, CPU_S_PER_SAMPLE / share)))

    def _report(self, late_s: float) -> None:
        """Log which line held the loop, unless it was named a moment ago."""
        line, self._held_at = self._held_at, ""
        now = time.monotonic()
        if not self._has_alarm or now - self._logged.get(line, -inf) < LOG_INTERVAL_S:
            return
        if len(self._logged) < MAX_NAMED_LINES:
            self._logged[line] = now
            fields = {"ms": round(late_s * 1e3), "at": line or _NO_CODE}
            level = logging.WARNING if line else logging.INFO
            log.log(level, "the event loop was held", extra={"fields": fields})


class GcPauseMonitor:
    """Measures Python's garbage collections, during which no Python code of the process runs."""

    def __init__(self, metrics: Registry) -> None:
        self._observe = metrics.histogram(
            "python_gc_pause_seconds", "Time of garbage collections of Python", LAG_BUCKETS_S
        ).observe
        self._began_at = 0.0

    def start(self) -> None:
        """Measure the collections from now on."""
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Stop measuring."""
        with suppress(ValueError):
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: object) -> None:
        """Python calls this before and after each collection."""
        del info
        if phase == "start":
            self._began_at = time.perf_counter()
        elif self._began_at:
            self._observe(time.perf_counter() - self._began_at)


def describe_frame(frame: FrameType | None) -> str:
    """Return the innermost line as `file:line in function`, and the first one outside the standard
    library and packages, if that is another; "" if the loop itself runs."""
    lines: list[str] = []
    while frame is not None and len(lines) < 2:
        name, code = frame.f_code.co_filename, frame.f_code
        if not lines and any(part in name for part in _LOOP_FILES):
            return ""
        is_own = "site-packages/" not in name and not name.startswith(_LIBRARY)
        if not lines or is_own:
            lines.append(f"{name}:{frame.f_lineno} in {code.co_qualname}")
            if is_own:
                break
        frame = frame.f_back
    return ", called by ".join(lines)


_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - a text
