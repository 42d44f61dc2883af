"""Budgets of reasoning over HTTP, on all three surfaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Deployment, Start

from dynamo.testing.family import write_family_folder

HI = [{"role": "user", "content": "Hi"}]
INSIDE = {"generation_prompt": "<|im_start|>assistant\n<think>\n"}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model whose reasoning begins and ends in tokens."""
    path = tmp_path / "model"
    write_family_folder(("<think>", "</think>"), path, tiny_model / "tokenizer.json")
    return path


def post(deployment: Deployment, path: str, **body: Any) -> Any:
    return deployment.post(f"/v1/{path}", {"model": "default", **body})[1]


def test_a_budget_ends_reasoning_on_every_surface(start: Start, folder: Path) -> None:
    served = start("out=mock", folder, "--tool-format", "hermes")
    chat = {"messages": HI, "max_tokens": 40, "chat_template_kwargs": INSIDE}
    free = post(served, "chat/completions", **chat)
    assert not free["choices"][0]["message"]["content"]
    answer = post(served, "chat/completions", **chat, thinking_token_budget=7)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["reasoning_content"]
    assert message["content"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 8
    none = post(served, "chat/completions", **chat, thinking_token_budget=0)
    assert "reasoning_content" not in none["choices"][0]["message"]
    unlimited = post(served, "chat/completions", **chat, thinking_token_budget=-1)
    assert unlimited["choices"][0]["message"] == free["choices"][0]["message"]

    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    formed = post(
        served, "chat/completions", **chat, thinking_token_budget=7, response_format=form
    )["choices"][0]["message"]
    assert formed["reasoning_content"]
    assert formed["content"].startswith('{"a": ')

    response = post(
        served,
        "responses",
        input="Hi",
        max_output_tokens=40,
        chat_template_kwargs=INSIDE,
        thinking_token_budget=7,
    )
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    thinking = {"type": "enabled", "budget_tokens": 7}
    answer = post(
        served,
        "messages",
        messages=HI,
        max_tokens=40,
        chat_template_kwargs=INSIDE,
        thinking=thinking,
    )
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


def test_a_budget_that_cannot_hold_is_refused_or_soft(
    start: Start, folder: Path, tiny_model: Path
) -> None:
    served = start("out=echo", folder, "--tool-format", "hermes")
    refused = post(served, "chat/completions", messages=HI, thinking_token_budget=7)["error"]
    assert refused["param"] == "thinking_token_budget"
    refused = post(served, "completions", prompt="Hi", thinking_token_budget=7)["error"]
    assert refused["param"] == "thinking_token_budget"
    thinking = {"type": "enabled", "budget_tokens": 7}
    soft = post(served, "messages", messages=HI, max_tokens=40, thinking=thinking)
    assert soft["content"][-1]["type"] == "text"
    served = start("out=mock", tiny_model)
    refused = post(served, "chat/completions", messages=HI, thinking_token_budget=7)["error"]
    assert "no tokens that begin and end its reasoning" in refused["message"]
    soft = post(served, "messages", messages=HI, max_tokens=10, thinking=thinking)
    assert soft["content"][-1]["type"] == "text"
