"""Two workers with vLLM behind a router: answers, cached prompts and what happens when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.acceptance.test_default_model import oracle
from tests.conftest import Deployment

ARGUMENTS = ("dtype=float32", "enforce_eager=true", "block_size=32", "num_gpu_blocks_override=256")
STREAMS = 8
CONVERSATIONS = 20
MAX_TOKENS = 24
KILLS = int(os.environ.get("DYNAMO_TEST_ENGINE_KILLS", "2"))
READY_S = 280.0


@pytest.fixture(scope="module")
def environ(runtime_environ: dict[str, str]) -> dict[str, str]:
    return runtime_environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def flags(model: Path, *further: str) -> list[str]:
    arguments = [word for argument in ARGUMENTS for word in ("--engine-arg", argument)]
    return ["out=vllm", str(model), *arguments, "--max-num-seqs", "16", *further]


@pytest.fixture(scope="module")
def deployment(
    engine_model: Path, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> Iterator[Deployment]:
    words = flags(engine_model, "--workers", "2", "--router-mode", "kv", "--max-model-len", "2048")
    deployment = Deployment(words, tmp_path_factory.mktemp("vllm"), environ)
    deployment.wait_ready(READY_S)
    wait_for_workers(deployment)
    yield deployment
    deployment.stop(timeout_s=60)


def wait_for_workers(deployment: Deployment) -> list[int]:
    """Return the ids of the two workers when both serve."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        workers = [p for p in deployment.processes() if p["role"] == "worker"]
        if len(workers) == 2 and all(p["state"] == "ready" for p in workers):
            return [p["pid"] for p in workers]
        time.sleep(1)
    pytest.fail(f"not two workers:\n{deployment.log.read_text()[-5000:]}")


def descendants(process: int) -> dict[int, str]:
    """Return the processes below one, with their command lines."""
    command = ["ps", "-eo", "pid=,ppid=,stat=,args="]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    rows = [line.split(None, 3) for line in output.splitlines()]
    below, parents = {}, {str(process)}
    for _ in rows:
        children = [row for row in rows if row[1] in parents and int(row[0]) not in below]
        if not children:
            break
        parents = {row[0] for row in children}
        below |= {int(row[0]): row[3] for row in children if "Z" not in row[2]}
    return below


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    url = f"{deployment.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=READY_S) as client:
        yield client


def chat(client: openai.OpenAI, messages: Sequence[Any], tokens: int) -> Any:
    return client.chat.completions.create(
        model="default", messages=messages, max_tokens=tokens, temperature=0
    )


def test_greedy_answers_are_those_of_the_oracle(client: openai.OpenAI) -> None:
    for case in oracle()[:5]:
        answer = chat(client, case["messages"], min(case["length"] + case["ends"], MAX_TOKENS))
        text = answer.choices[0].message.content
        assert text
        assert case["text"].startswith(text)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_tool_calls_are_forced(client: openai.OpenAI, choice: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2, 3]}},
        "required": ["days"],
    }
    function = {"name": "forecast", "parameters": parameters}
    named = {"type": "function", "function": {"name": "forecast"}}
    for content in ("Hello!", "Write a poem about the sea."):
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": content}],
            tools=[{"type": "function", "function": function}],
            tool_choice="required" if choice == "required" else named,
            parallel_tool_calls=False,
            max_tokens=80,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "forecast"
        assert json.loads(call.function.arguments)["days"] in (1, 2, 3)


def test_an_answer_that_is_cut_inside_a_character_ends_before_it(client: openai.OpenAI) -> None:
    for tokens, text in ((1, "a"), (3, "a"), (4, "a🎉"), (6, "a🎉")):
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=tokens,
            extra_body={"structured_outputs": {"regex": "a🎉🎉🎉"}},
        )
        assert answer.choices[0].message.content == text


def test_a_completion_has_the_logprobs_of_its_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default",
        prompt="The capital of France is",
        echo=True,
        logprobs=1,
        max_tokens=0,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    first, *others = logprobs.token_logprobs
    assert first is None
    assert len(others) == 4
    assert all(value < 0 for value in others)


def test_second_turns_find_their_prompt_in_the_cache(client: openai.OpenAI) -> None:
    for number in range(CONVERSATIONS):
        text = f"{number} is my number. " * 12 + "Which number is it?"
        first = [{"role": "user", "content": text}]
        answer = chat(client, first, 8).choices[0].message.content
        time.sleep(0.5)  # vLLM tells its blocks after the answer
        second = [
            *first,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Are you sure?"},
        ]
        usage = chat(client, second, 2).usage
        assert usage.prompt_tokens_details.cached_tokens >= 64


def stream_texts(client: openai.OpenAI, on_text: Any = None) -> list[str]:
    """Return the texts of greedy answers that are computed at once. `on_text(texts)` is called with
    what has come of each."""
    texts = [""] * STREAMS

    def ask(number: int) -> None:
        stream = client.completions.create(
            model="default",
            prompt=f"Tell me a story about the number {number}. Once upon a time",
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            texts[number] += chunk.choices[0].text

    with ThreadPoolExecutor(STREAMS) as threads:
        answers = [threads.submit(ask, number) for number in range(STREAMS)]
        if on_text is not None:
            on_text(texts)
        for answer in answers:
            answer.result()
    return texts


@pytest.mark.parametrize("number", [signal.SIGKILL] * KILLS + [signal.SIGSTOP])
def test_an_engine_core_that_ends_or_hangs_fails_no_request(
    deployment: Deployment, client: openai.OpenAI, number: signal.Signals
) -> None:
    workers = wait_for_workers(deployment)
    expected = stream_texts(client)
    stopped: list[int] = []

    def send(texts: list[str]) -> None:
        while not all(texts):
            time.sleep(0.05)
        below = descendants(workers[0])
        os.kill(next(pid for pid, name in below.items() if "EngineCore" in name), number)
        stopped.extend(below)

    assert stream_texts(client, send) == expected
    while workers[0] in wait_for_workers(deployment):
        time.sleep(1)
    while any(map(lives, stopped)):
        time.sleep(0.1)


def test_no_process_of_an_engine_outlives_its_worker(deployment: Deployment) -> None:
    worker = wait_for_workers(deployment)[0]
    below = descendants(worker)
    assert any("EngineCore" in name for name in below.values())
    os.kill(worker, signal.SIGKILL)
    while any(map(lives, below)):
        time.sleep(0.1)


def lives(process: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_a_start_without_enough_memory_names_the_setting(
    engine_model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    words = flags(engine_model, "--engine-arg", "num_gpu_blocks_override=3")
    deployment = Deployment(words, tmp_path, environ)
    assert deployment.process.wait(READY_S) != 0
    assert "--max-model-len 64" in deployment.log.read_text()
    assert json.dumps(deployment.processes()) == "[]"
