"""A worker with vLLM and one with the native engine serve one model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tests.acceptance.test_default_model import oracle
from tests.conftest import Deployment, until
from tests.engines.test_vllm_serving import MAX_TOKENS, READY_S, environ, flags

ENGINES = ("vllm", "native")
CONVERSATIONS = 20
MIN_BLOCKS = 4
__all__ = ["environ"]  # a fixture


@pytest.fixture(scope="module")
def deployment(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> Iterator[Deployment]:
    """Two deployments with one discovery folder. The first one has the frontend."""
    folder = tmp_path_factory.mktemp("mixed")
    common = ["--discovery", f"file:{folder / 'discovery'}", "--model-name", "smol"]
    common += ["--router-mode", "kv", "--max-model-len", "2048"]
    first = Deployment(
        flags(engine_model, *common, "--worker-labels", "engine=vllm"), folder, environ
    )
    words = ["in=none", "out=native", str(engine_model), *common, "--threads", "1"]
    second = Deployment([*words, "--worker-labels", "engine=native"], folder, environ)
    try:
        first.wait_ready(READY_S)
        until(lambda: json.loads(first.get("/health")[1])["workers"] == {"smol": 2}, READY_S)
        yield first
    finally:
        for deployment in (second, first):
            deployment.stop(timeout_s=60)


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    url = f"{deployment.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=READY_S) as client:
        yield client


class Turn(NamedTuple):
    """An answer. `request_id` finds its routing decision."""

    text: str
    cached: int
    worker: str
    request_id: str


def chat(client: openai.OpenAI, messages: Sequence[Any], tokens: int, engine: str = "") -> Turn:
    """Return the answer. `engine` names the one that must give it."""
    headers = {"x-dynamo-labels": f"engine={engine}"} if engine else {}
    response = client.chat.completions.with_raw_response.create(
        model="smol", messages=messages, max_tokens=tokens, temperature=0, extra_headers=headers
    )
    answer = response.parse()
    return Turn(
        answer.choices[0].message.content,
        answer.usage.prompt_tokens_details.cached_tokens,
        response.headers["x-dynamo-worker"],
        response.headers["x-request-id"],
    )


def test_both_engines_give_the_answers_of_the_oracle(client: openai.OpenAI) -> None:
    workers: dict[str, set[str]] = {engine: set() for engine in ENGINES}
    for case in oracle()[:5]:
        for engine in ENGINES:
            tokens = min(case["length"] + case["ends"], MAX_TOKENS)
            turn = chat(client, case["messages"], tokens, engine)
            assert turn.text
            assert case["text"].startswith(turn.text)
            workers[engine].add(turn.worker)
    assert [len(names) for names in workers.values()] == [1, 1]
    assert workers["vllm"] != workers["native"]


def second_turn(number: int, answer: str) -> list[Mapping[str, str]]:
    text = f"{number} is my number. " * 12 + "Which number is it?"
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Are you sure?"},
    ]


def test_a_conversation_of_either_engine_is_found_and_goes_on_on_both(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    for number in range(CONVERSATIONS):
        holder, other = ENGINES[number % 2], ENGINES[(number + 1) % 2]
        answer = chat(client, second_turn(number, "")[:1], 8, holder).text
        time.sleep(0.5)  # vLLM tells its blocks after the answer
        messages = second_turn(number, answer)
        free = chat(client, messages, 8)
        status, explained = deployment.get(f"/router/explain/{free.request_id}")
        assert status == 200
        (decision,) = json.loads(explained)["decisions"]
        assert decision["best_overlap_blocks"] >= MIN_BLOCKS
        held = chat(client, messages, 8, holder)
        assert held.cached >= MIN_BLOCKS * 16
        assert held.text == free.text == chat(client, messages, 8, other).text
