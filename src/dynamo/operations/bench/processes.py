"""The CPU of a deployment on this host, and our own."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from dynamo.operations.bench.figures import ProcessCpu
from dynamo.runtime.deployment import ProcessRecord, live_deployments

OWN = "bench"
LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class Cpu:
    """Reads the CPU time of the processes behind `url`, by role; those of other hosts: none."""

    def __init__(self, url: str) -> None:
        self._roles: dict[str, list[int]] = {}
        for process in _behind(url):
            self._roles.setdefault(process.role, []).append(process.pid)
        self._before = self._after = self._spent()

    def start(self) -> None:
        """Measure from now on."""
        self._before = self._spent()

    def stop(self) -> None:
        """Measure until now."""
        self._after = self._spent()

    def per(self, tokens: int, requests: int) -> Mapping[str, ProcessCpu]:
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

    def _spent(self) -> dict[str, float]:
        found = {role: sum(map(_seconds, pids)) for role, pids in self._roles.items()}
        own = resource.getrusage(resource.RUSAGE_SELF)
        return found | {OWN: own.ru_utime + own.ru_stime}


def _behind(url: str) -> Sequence[ProcessRecord]:
    parts = urlsplit(url)
    if parts.hostname not in LOCAL:
        return ()
    for deployment in live_deployments():
        processes = deployment.processes()
        ports = {urlsplit(one.address).port for one in processes if "http" in one.address}
        if parts.port in ports:
            return processes
    return ()


def _seconds(pid: int) -> float:
    """Time on a CPU of one process, all its threads."""
    spent = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(stat.read_text().split()[0])
    return spent / 1e9
