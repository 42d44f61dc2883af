"""`dynamo bench` against simulated workers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment

from dynamo.operations import benchmark_latency
from dynamo.operations.bench.bench import BenchConfig, run_bench
from dynamo.operations.bench.load_client import Unreachable
from dynamo.operations.bench.workload import (
    BenchTarget,
    LatencyObjectives,
    LoadProfile,
    RequestShape,
)

TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 30, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 9, "input_length": 32, "output_length": 2, "hash_ids": [7, 8], "session_id": 1},
    {"input_length": 48, "output_length": 2, "hash_ids": [7, 8, 9], "session_id": 1, "delay": 5},
]


def run(deployment: Deployment, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", "bench", deployment.url, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=deployment.environ)


def result(deployment: Deployment, *arguments: object) -> Any:
    ended = run(deployment, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_closed_loop(mock_deployment: Deployment, tmp_path: Path) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["-c", 4, "--requests", 20, "--isl", 50, "--osl", 10, "--warmup", 4]
    ended = run(
        mock_deployment, *arguments, "--slo-ttft", "10s", "--out", out, "--picture", picture
    )

    assert ended.returncode == 0, ended.stderr
    assert "20 requests in" in ended.stdout
    assert "goodput" in ended.stdout
    report = json.loads(out.read_text())
    assert (report["requests"], report["failed"], report["output_tokens"]) == (20, 0, 200)
    assert report["events_per_token"] <= 1
    assert report["ttft_ms"]["n"] == 20
    assert report["goodput"]["ratio"] == 1
    assert {"frontend", "worker", "supervisor", "bench"} == set(report["processes"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    same = [sys.executable, "-m", "dynamo", "bench", "compare", str(out), str(out)]
    table = subprocess.run(same, capture_output=True, text=True, check=True).stdout
    assert "ttft_ms.p99" in table


def test_ctrl_c_shows_the_results_so_far(mock_deployment: Deployment) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", mock_deployment.url, "-c", "2", "--json"]
    command += ["--duration", "50s", "--osl", "4", "--name", "cut"]
    served = re.compile(r'requests_total\{model="tiny".*status="200"\} (\d+)')

    def count() -> int:
        return sum(map(int, served.findall(mock_deployment.get("/metrics")[1])))

    before = count()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=mock_deployment.environ) as bench:
        while count() < before + 5:
            time.sleep(0.02)
        bench.send_signal(signal.SIGINT)
        output, _ = bench.communicate(timeout=20)

    assert bench.returncode == 130
    report = json.loads(output)
    assert (report["interrupted"], report["failed"]) == (True, 0)
    assert 0 < report["requests"] <= count() - before


def test_prompts_have_exactly_the_requested_tokens(mock_deployment: Deployment) -> None:
    arguments = ["--completions", "--requests", 5, "--osl", 1, "--isl", 77]

    assert result(mock_deployment, *arguments)["prompt_tokens"] == 5 * 77


def test_another_tokenizer(mock_deployment: Deployment, tiny_model: Path) -> None:
    arguments = ["--completions", "--requests", 2, "--osl", 1, "--tokenizer", tiny_model]

    assert result(mock_deployment, *arguments)["prompt_tokens"] == 2 * 128


def test_an_open_loop(mock_deployment: Deployment) -> None:
    report = result(mock_deployment, "--rate", "20..60", "--duration", "1s", "--osl", 4)

    assert report["failed"] == 0
    assert report["requests"] > 10
    assert report["settings"]["load"]["rate_to"] == 60


def test_a_trace_is_replayed(mock_deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    report = result(mock_deployment, "--trace", path, "--block-tokens", 16)

    assert (report["requests"], report["output_tokens"]) == (4, 10)


def test_conversations_grow(mock_deployment: Deployment) -> None:
    report = result(mock_deployment, "--turns", 3, "--requests", 6, "--isl", 40, "--osl", 8)

    assert report["requests"] == 6
    assert report["prompt_tokens"] > 6 * 40 + 2 * 3 * 40


async def test_the_bench_as_a_library(
    mock_deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    results = await benchmark_latency(mock_deployment.url, write=lines.append)

    assert [result.output_tokens for result in results] == [100, 200, 300]
    assert lines[0].startswith("input 50 tokens, output 100 tokens: latency ")
    bench = BenchConfig(
        target=BenchTarget(url=mock_deployment.url, model="nope"),
        shape=RequestShape(),
        load=LoadProfile(requests=1),
        objectives=LatencyObjectives(),
    )
    with pytest.raises(Unreachable, match="nope"):
        await run_bench(bench)


def test_lengths_beyond_the_context_are_refused_before_prompts_are_created(
    mock_deployment: Deployment,
) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", mock_deployment.url, "--isl", "99999999"]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode == 2
    assert "99999999 tokens in and 64 out are more than the context of" in ended.stderr


def test_an_unreachable_server_is_an_error(mock_deployment: Deployment) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode == 1
    assert "cannot connect" in ended.stderr
    assert "hint:" in ended.stderr
