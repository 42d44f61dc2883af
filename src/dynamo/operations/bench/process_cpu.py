"""The CPU of a deployment on this host, and our own."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.operations.bench.bench_result import ProcessCpu
from dynamo.runtime.deployment import ProcessRecord, live_deployments

BENCH_ROLE = "bench"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class ProcessCpuMeter:
    """Reads the CPU time of the processes behind `url`, by role; those of other hosts: none."""

    def __init__(self, url: str) -> None:
        self._pids_by_role: dict[str, list[int]] = {}
        for process in _processes_serving(url):
            self._pids_by_role.setdefault(process.role, []).append(process.pid)
        self._before = self._after = self._read_cpu_s()

    def start(self) -> None:
        """Measure from now on."""
        self._before = self._read_cpu_s()

    def stop(self) -> None:
        """Measure until now."""
        self._after = self._read_cpu_s()

    def summarize(self, tokens: int, requests: int) -> Mapping[str, ProcessCpu]:
        """By role, what was spent between `start` and `stop`."""
        spent = {role: self._after[role] - before for role, before in self._before.items()}
        return {
            role: ProcessCpu(
                cpu_s=round(cpu_s, 4),
                us_per_token=round(cpu_s / max(1, tokens) * 1e6, 2),
                us_per_request=round(cpu_s / max(1, requests) * 1e6, 1),
            )
            for role, cpu_s in spent.items()
        }

    def _read_cpu_s(self) -> dict[str, float]:
        found = {role: sum(map(_process_cpu_s, pids)) for role, pids in self._pids_by_role.items()}
        own = resource.getrusage(resource.RUSAGE_SELF)
        return found | {BENCH_ROLE: own.ru_utime + own.ru_stime}


def _processes_serving(url: str) -> Sequence[ProcessRecord]:
    parts = urlsplit(url)
    if parts.hostname not in LOCAL_HOSTS:
        return ()
    for deployment in live_deployments():
        processes = deployment.live_processes()
        ports = {urlsplit(one.address).port for one in processes if "http" in one.address}
        if parts.port in ports:
            return processes
    return ()


def _process_cpu_s(pid: int) -> float:
    """Time on a CPU of one process, all its threads."""
    spent = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(stat.read_text().split()[0])
    return spent / 1e9
