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
    found = json.loads(out.read_text())
    assert (found["requests"], found["failed"], found["output_tokens"]) == (20, 0, 200)
    assert found["events_per_token"] <= 1
    assert found["ttft_ms"]["n"] == 20
    assert found["goodput"]["ratio"] == 1
    assert {"frontend", "worker", "supervisor", "bench"} == set(found["processes"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    same = [sys.executable, "-m", "dynamo", "bench", "compare", str(out), str(out)]
    table = subprocess.run(same, capture_output=True, text=True, check=True).stdout
    assert "ttft_ms.p99" in table


def test_ctrl_c_shows_what_was_answered(mock_deployment: Deployment) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", mock_deployment.url, "-c", "2", "--json"]
    command += ["--duration", "50s", "--osl", "4", "--name", "cut"]
    served = re.compile(r'requests_total\{model="tiny".*status="200"\} (\d+)')

    def count() -> int:
        found = served.search(mock_deployment.get("/metrics")[1])
        return int(found[1]) if found else 0

    before = count()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=mock_deployment.environ) as bench:
        while count() < before + 5:
            time.sleep(0.02)
        bench.send_signal(signal.SIGINT)
        told, _ = bench.communicate(timeout=20)

    assert bench.returncode == 130
    found = json.loads(told)
    assert (found["interrupted"], found["failed"]) == (True, 0)
    assert 0 < found["requests"] <= count() - before


def test_prompts_have_exactly_the_tokens_asked_for(mock_deployment: Deployment) -> None:
    arguments = ["--completions", "--requests", 5, "--osl", 1, "--isl", 77]

    assert result(mock_deployment, *arguments)["prompt_tokens"] == 5 * 77


def test_a_tokenizer_of_ones_own(mock_deployment: Deployment, tiny_model: Path) -> None:
    arguments = ["--completions", "--requests", 2, "--osl", 1, "--tokenizer", tiny_model]

    assert result(mock_deployment, *arguments)["prompt_tokens"] == 2 * 128


def test_an_open_loop(mock_deployment: Deployment) -> None:
    found = result(mock_deployment, "--rate", "20..60", "--duration", "1s", "--osl", 4)

    assert found["failed"] == 0
    assert found["requests"] > 10
    assert found["settings"]["load"]["rate_to"] == 60


def test_a_trace_finds_its_shared_blocks_cached(
    mock_deployment: Deployment, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    found = result(mock_deployment, "--trace", path, "--block-tokens", 16)

    assert (found["requests"], found["output_tokens"]) == (4, 10)


def test_conversations_grow(mock_deployment: Deployment) -> None:
    found = result(mock_deployment, "--turns", 3, "--requests", 6, "--isl", 40, "--osl", 8)

    assert found["requests"] == 6
    assert found["prompt_tokens"] > 6 * 40 + 2 * 3 * 40


async def test_as_a_library(mock_deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    results = await benchmark_latency(mock_deployment.url, write=told.append)

    assert [one.output_tokens for one in results] == [100, 200, 300]
    assert told[0].startswith("input 50 tokens, output 100 tokens: latency ")
    bench = BenchConfig(
        target=BenchTarget(url=mock_deployment.url, model="nope"),
        shape=RequestShape(),
        load=LoadProfile(requests=1),
        objectives=LatencyObjectives(),
    )
    with pytest.raises(Unreachable, match="nope"):
        await run_bench(bench)


def test_what_is_beyond_the_context_is_refused_before_prompts_are_made(
    mock_deployment: Deployment,
) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", mock_deployment.url, "--isl", "99999999"]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode == 2
    assert "99999999 tokens in and 64 out are more than the context of" in ended.stderr


def test_a_server_that_is_not_there(mock_deployment: Deployment) -> None:
    command = [sys.executable, "-m", "dynamo", "bench", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode == 1
    assert "cannot connect" in ended.stderr
    assert "hint:" in ended.stderr
