"""Metrics of the operating system about this process, under Prometheus' customary names."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dynamo.telemetry.metrics import Registry


def add_process_metrics(registry: Registry) -> None:
    """Add CPU time, memory, open files and start time, read from Linux's /proc at each scrape."""
    registry.counter(
        "process_cpu_seconds_total", "CPU time, user and system", callback=time.process_time
    )
    registry.gauge("process_resident_memory_bytes", "memory in RAM", callback=_resident_bytes)
    registry.gauge("process_open_fds", "open files and sockets", callback=_open_files)
    started = time.time()
    registry.gauge(
        "process_start_time_seconds",
        "start time, Unix seconds",
        callback=lambda: started,
        merge="max",
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough
