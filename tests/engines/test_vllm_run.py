"""`dynamo run out=vllm`: a served answer, its log, and starts that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import Start

ARGUMENTS = (
    "--num-blocks=16",
    "--engine.block_size=32",
    "--engine-arg=dtype=float32",
    "--engine-arg=enforce_eager=true",
)
START_S = 580.0


@pytest.fixture(autouse=True)
def small_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_vllm_serves_and_each_of_its_lines_is_a_log_record(
    engine_model: Path, start: Start
) -> None:
    words = ("out=vllm", engine_model, "--max-model-len=256", "--log-format=json")
    deployment = start(*words, *ARGUMENTS, ready=False)
    deployment.wait_ready(START_S)

    body = {"model": "default", "prompt": "The capital of France is", "temperature": 0}
    status, answer = deployment.post("/v1/completions", body | {"max_tokens": 8})

    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8
    assert "Paris" in answer["choices"][0]["text"]
    records = [json.loads(line) for line in deployment.log.read_text().splitlines()]
    engine = [record for record in records if "vllm" in record["target"].split(".")]
    assert any(record.get("process", "").startswith("EngineCore") for record in engine)


def test_too_little_memory_is_reported_with_the_setting_to_change(
    engine_model: Path, start: Start
) -> None:
    words = ("out=vllm", engine_model, "--max-model-len=8192")
    deployment = start(*words, *ARGUMENTS, ready=False)

    assert deployment.process.wait(START_S) != 0

    reason, hint = deployment.log.read_text().splitlines()[-2:]
    assert "max seq len (8192)" in reason
    assert "--max-model-len " in hint


def test_a_missing_folder_is_reported_before_vllm_starts(start: Start) -> None:
    deployment = start("out=vllm", "/missing/folder", ready=False)

    assert deployment.process.wait(60) != 0

    assert "there is no file or folder /missing/folder" in deployment.log.read_text()
