"""Output of `dynamo bench` when no request was answered."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli import main
from dynamo.cli.benchmark import bench
from dynamo.operations.bench import bench as runs
from dynamo.operations.bench.bench_result import BenchResult, BenchRun, compute_result
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import LatencyObjectives


def result_of_failures(*_: Any) -> BenchResult:
    failed = RequestSample(array("d"))
    failed.error = "http 503"
    return compute_result(BenchRun([failed] * 3, array("d"), 0.0, 2.0), LatencyObjectives(200.0))


def test_without_an_answer_no_figures_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_run_single", result_of_failures)
    picture = tmp_path / "a.png"
    assert main(["bench", "http://127.0.0.1:1", "--picture", str(picture)]) == 1

    printed = capsys.readouterr()
    assert "no request was answered" in printed.err
    assert printed.out.splitlines()[1:] == [
        "0 requests in 2 s, 3 failed",
        "failed      3  http 503",
    ]
    assert not picture.exists()


def test_a_preset_names_the_cases_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_bench(*_: Any) -> BenchResult:
        return result_of_failures()

    monkeypatch.setattr(runs, "run_bench", run_bench)
    assert main(["bench", "http://127.0.0.1:1", "--preset", "benchmark_latency"]) == 1

    printed = capsys.readouterr()
    assert printed.out.count("no request was answered, 3 failed: http 503") == 3
    assert "latency" not in printed.out
