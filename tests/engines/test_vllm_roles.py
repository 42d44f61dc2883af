"""A prefill and a decode worker with vLLM, as `dynamo run` starts them."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.acceptance.test_default_model import oracle
from tests.conftest import Deployment, until
from tests.engines.test_vllm_serving import MAX_TOKENS, READY_S, chat, environ, flags

PROMPTS = 20
FALLBACKS = "dynamo_worker_prefill_fallbacks_total"
__all__ = ["environ"]  # a fixture


@pytest.fixture(scope="module")
def deployment(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> Iterator[Deployment]:
    roles = ("--prefill-workers", "1", "--decode-workers", "1", "--disagg", "always")
    words = flags(engine_model, *roles, "--router-mode", "kv", "--max-model-len", "1024")
    deployment = Deployment(words, tmp_path_factory.mktemp("roles"), environ)
    deployment.wait_ready(READY_S)
    until(lambda: {"ready"} == {p["state"] for p in deployment.processes()}, READY_S)
    yield deployment
    deployment.stop(timeout_s=60)


def read_counter(deployment: Deployment, role: str, name: str) -> float:
    """Return the sum of a counter over its labels in the process of a role."""
    (process,) = (p for p in deployment.processes() if p["role"] == role)
    with urllib.request.urlopen(f"{process['status_url']}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(
        float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    )


def check_answers(deployment: Deployment, count: int) -> None:
    """Ask for greedy answers and compare them with the oracle's."""
    with openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="any", max_retries=0, timeout=READY_S
    ) as client:
        for case in oracle()[:count]:
            tokens = min(case["length"] + case["ends"], MAX_TOKENS)
            text = chat(client, case["messages"], tokens).choices[0].message.content
            assert text
            assert case["text"].startswith(text)


def ask_with_new_prompt(deployment: Deployment) -> None:
    """Ask for an answer to a prompt that no worker has seen."""
    prompt = "Repeat after me: " + "the green bird sings at night, " * 8
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, answer = deployment.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def test_prompts_come_from_the_prefill_worker(deployment: Deployment) -> None:
    check_answers(deployment, PROMPTS)
    chosen = read_counter(deployment, "frontend", "dynamo_router_remote_prefills_total")
    failed = read_counter(deployment, "decode_worker", FALLBACKS)
    assert chosen >= len(oracle()[:PROMPTS])
    assert failed < chosen / 2, deployment.log.read_text()[-5000:]


def test_a_prefill_worker_that_hangs_and_dies_fails_no_request(deployment: Deployment) -> None:
    """Stop the prefill worker, whose prompt the decode worker then computes, and kill it."""
    (worker,) = (p for p in deployment.processes() if p["role"] == "prefill_worker")
    fallbacks = read_counter(deployment, "decode_worker", FALLBACKS)
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        ask_with_new_prompt(deployment)
    finally:
        os.kill(worker["pid"], signal.SIGKILL)
    assert read_counter(deployment, "decode_worker", FALLBACKS) > fallbacks
    check_answers(deployment, 3)
