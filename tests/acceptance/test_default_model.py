"""`dynamo run` with nothing else: the default model, over HTTP, says what transformers says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Deployment

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
NEAR_TIE = 1e-3
END = 2
"""<|im_end|>"""


@pytest.fixture(scope="module")
def default_deployment(
    tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[Deployment]:
    one = Deployment([], tmp_path_factory.mktemp("default"), runtime_environ)
    one.wait_ready(300)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def client(default_deployment: Deployment) -> Iterator[openai.OpenAI]:
    url = default_deployment.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as one:
        yield one


def oracle() -> list[dict[str, Any]]:
    """Prompts with transformers' greedy answers; those with a near tie before their end left out."""
    prompts = json.loads((ORACLE / "prompts.json").read_text())
    answers = {a["name"]: a for a in json.loads((ORACLE / "greedy.json").read_text())["answers"]}
    found = []
    for prompt in prompts:
        answer = answers[prompt["name"]]
        ids = answer["ids"]
        length = ids.index(END) if END in ids else len(ids)
        if min(answer["gaps"][:length]) > NEAR_TIE and len(answer["prompt_ids"]) < 120:
            found.append({**prompt, "length": length, "ends": END in ids, "text": answer["text"]})
    return found


def greedy(client: openai.OpenAI, one: dict[str, Any]) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=one["messages"],
        max_tokens=max(1, one["length"] + one["ends"]),
        temperature=0,
    )


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.timeout(120)
def test_five_prompts_equal_transformers_greedy_text(client: openai.OpenAI) -> None:
    chosen = oracle()[1:6]
    assert len(chosen) == 5
    for one in chosen:
        text = greedy(client, one).choices[0].message.content
        assert text
        assert one["text"].startswith(text), one["name"]
        if one["ends"]:
            assert greedy(client, one).choices[0].finish_reason == "stop"


def test_the_second_time_comes_from_the_cache(client: openai.OpenAI) -> None:
    one = oracle()[0]
    first, second = greedy(client, one), greedy(client, one)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_seeded_sampling_repeats_and_differs(client: openai.OpenAI) -> None:
    def say(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=16,
            temperature=1.2,
            seed=seed,
        )
        return answer.choices[0].message.content

    assert say(1) == say(1)
    assert say(1) != say(2)
