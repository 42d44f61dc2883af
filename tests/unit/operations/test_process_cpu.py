"""The CPU time of a deployment's processes, some of which end meanwhile."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from dynamo.operations.bench import bench_result as process_cpu
from dynamo.operations.bench.bench_result import ProcessCpuMeter


def test_a_process_that_ends_meanwhile_counts_no_negative_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {1: 5.0, 2: 7.0, os.getpid(): 0.0}
    processes = [SimpleNamespace(pid=1, role="worker"), SimpleNamespace(pid=2, role="worker")]
    monkeypatch.setattr(process_cpu, "_processes_serving", lambda _: processes)
    monkeypatch.setattr(process_cpu, "_process_cpu_s", lambda pid: used[pid])
    meter = ProcessCpuMeter("http://127.0.0.1:8000")
    meter.start()
    used |= {1: 0.0, 2: 8.0}
    meter.stop()

    summary = meter.summarize(tokens=1_000_000, requests=10)
    assert list(summary) == ["worker", "bench"]
    assert (summary["worker"].cpu_s, summary["worker"].us_per_token) == (1.0, 1.0)
