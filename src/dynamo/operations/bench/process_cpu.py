"""CPU time of the measured deployment's processes on this host, and of the load generator."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.operations.bench.bench_result import ProcessCpu
from dynamo.runtime.deployment import ProcessRecord, live_deployments

BENCH_ROLE = "bench"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class ProcessCpuMeter:
    """Measures the CPU time, by role, of the processes behind `url` on this host."""

    def __init__(self, url: str) -> None:
        self._roles = {process.pid: process.role for process in _processes_serving(url)}
        self._roles[os.getpid()] = BENCH_ROLE
        self._before = self._after = self._read_cpu_s()

    def start(self) -> None:
        """Begin the measured interval."""
        self._before = self._read_cpu_s()

    def stop(self) -> None:
        """End the measured interval."""
        self._after = self._read_cpu_s()

    def summarize(self, tokens: int, requests: int) -> Mapping[str, ProcessCpu]:
        """Return the CPU time between `start` and `stop` by role, of the processes that have not
        ended between them."""
        used: defaultdict[str, float] = defaultdict(float)
        for pid, role in self._roles.items():
            if self._after[pid]:
                used[role] += self._after[pid] - self._before[pid]
        return {
            role: ProcessCpu(
                cpu_s=round(cpu_s, 4),
                us_per_token=round(cpu_s / max(1, tokens) * 1e6, 2),
                us_per_request=round(cpu_s / max(1, requests) * 1e6, 1),
            )
            for role, cpu_s in sorted(used.items(), key=lambda item: item[0] == BENCH_ROLE)
        }

    def _read_cpu_s(self) -> Mapping[int, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        by_pid = {pid: _process_cpu_s(pid) for pid in self._roles}
        return by_pid | {os.getpid(): own.ru_utime + own.ru_stime}


def _processes_serving(url: str) -> Sequence[ProcessRecord]:
    parts = urlsplit(url)
    if parts.hostname not in LOCAL_HOSTS:
        return ()
    for deployment in live_deployments():
        processes = deployment.live_processes()
        ports = {urlsplit(record.address).port for record in processes if "http" in record.address}
        if parts.port in ports:
            return processes
    return ()


def _process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process; 0 once the process has ended."""
    used_ns = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            used_ns += int(stat.read_text().split()[0])
    return used_ns / 1e9
