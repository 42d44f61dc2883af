"""`dynamo run` without arguments: the default model over HTTP equals transformers' answers."""

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
    deployment = Deployment([], tmp_path_factory.mktemp("default"), runtime_environ)
    deployment.wait_ready(300)
    yield deployment
    deployment.stop()


@pytest.fixture(scope="module")
def client(default_deployment: Deployment) -> Iterator[openai.OpenAI]:
    url = default_deployment.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def oracle() -> list[dict[str, Any]]:
    """Return prompts with transformers' greedy answers, without those that have a near tie."""
    prompts = json.loads((ORACLE / "prompts.json").read_text())
    answers = {a["name"]: a for a in json.loads((ORACLE / "greedy.json").read_text())["answers"]}
    cases = []
    for prompt in prompts:
        answer = answers[prompt["name"]]
        ids = answer["ids"]
        length = ids.index(END) if END in ids else len(ids)
        if min(answer["gaps"][:length]) > NEAR_TIE and len(answer["prompt_ids"]) < 120:
            cases.append({**prompt, "length": length, "ends": END in ids, "text": answer["text"]})
    return cases


def greedy(client: openai.OpenAI, case: dict[str, Any]) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=case["messages"],
        max_tokens=max(1, case["length"] + case["ends"]),
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
    cases = oracle()[1:6]
    assert len(cases) == 5
    for case in cases:
        answer = greedy(client, case)
        text = answer.choices[0].message.content
        assert text
        assert case["text"].startswith(text), case["name"]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == case["length"] + case["ends"], "the end counts"
        assert answer.choices[0].finish_reason == ("stop" if case["ends"] else "length")
    assert any(case["ends"] for case in cases)


def test_a_repeated_prompt_comes_from_the_cache(client: openai.OpenAI) -> None:
    case = oracle()[0]
    first, second = greedy(client, case), greedy(client, case)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_seeded_sampling_repeats_and_differs(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=16,
            temperature=1.2,
            seed=seed,
        )
        return answer.choices[0].message.content

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
