"""Limits of fields, and the budgets of a request and of its answer."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.application.generation import replies

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "words", "messages": HI} | fields


# route, body, and what the answer names: the field, its size and the limit
TOO_LARGE_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat(cache_salt="s" * 257), "cache_salt: 257 bytes, limit 256"),
    (CHAT, chat(cache_salt="\u00e9" * 129), "cache_salt: 258 bytes, limit 256"),
    (CHAT, chat(stop_token_ids=[1] * 1025), "stop_token_ids: 1,025 entries, limit 1,024"),
    (
        CHAT,
        chat(logit_bias={str(token): 1 for token in range(1025)}),
        "logit_bias: 1,025 entries, limit 1,024",
    ),
    (CHAT, chat(user="u" * 1025), "user: 1,025 bytes, limit 1,024"),
    (CHAT, chat(stop=["s"] * 65), "stop: 65 strings, limit 64"),
    (CHAT, chat(stop="s" * 1025), "stop: 1,025 characters in a string, limit 1,024"),
    (
        CHAT,
        chat(chat_template_kwargs={str(name): 1 for name in range(65)}),
        "chat_template_kwargs: 65 entries, limit 64",
    ),
    (CHAT, chat(reasoning_effort="x" * 1025), "reasoning_effort: 1,025 characters, limit 1,024"),
    (CHAT, chat(tools=[TOOL] * 129, tool_choice="none"), "tools: 129 entries, limit 128"),
    (
        TEXT,
        {"model": "words", "prompt": "a", "cache_salt": "s" * 257},
        "cache_salt: 257 bytes, limit 256",
    ),
]


async def test_fields_have_limits(site: Any, connect: Any) -> None:
    async with connect(site.port) as connection:
        for path, body, message in TOO_LARGE_FIELDS:
            connection.ask("POST", path, body)
            answer = await connection.answer()
            assert answer.status == 400, message
            assert answer.error["code"] == "invalid_request"
            assert answer.error["message"] == message
            assert answer.error["param"] == message.split(":")[0]
        connection.ask("POST", CHAT, chat(), {"x-dynamo-labels": "zone=a," * 200})
        answer = await connection.answer()
        assert answer.error["message"] == "x-dynamo-labels: 1,400 bytes, limit 1,024"
        connection.ask("POST", CHAT, chat(model="m" * 5000))
        assert len((await connection.answer()).error["message"]) < 500
    assert not site.processor.requests


async def test_fields_at_their_limits_are_accepted(site: Any, connect: Any) -> None:
    body = chat(
        cache_salt="s" * 256,
        stop_token_ids=list(range(1024)),
        logit_bias={str(token): 1 for token in range(1024)},
        user="u" * 1024,
        stop=["s" * 1024] * 64,
        chat_template_kwargs={str(name): 1 for name in range(64)},
    )
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, body, {"traceparent": "0" * 300})
        assert (await connection.answer()).status == 200
    assert site.processor.contexts[0].trace == ""


async def test_a_request_beyond_its_budget_is_too_large(
    site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "MAX_ENCODED_BYTES", 4000)
    entries = {"stop_token_ids": [1] * 1024, "prompt": [[5]] * 513}
    long = {"prompt": [[5] * 400] * 3}
    async with connect(site.port) as connection:
        for fields, message in (
            (entries, "prompt: 513 prompts times 1,024 entries"),
            (long, "prompt: 1,200 tokens and the texts that choices repeat take 4,800 bytes"),
        ):
            connection.ask("POST", TEXT, {"model": "words", **fields})
            answer = await connection.answer()
            assert answer.status == 413, message
            assert answer.error["code"] == "request_too_large"
            assert answer.error["param"] == "prompt"
            assert answer.error["message"].startswith(message)


async def test_a_whole_answer_has_a_bounded_number_of_logprobs(
    site: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "MAX_LOGPROBS", 6 * 2 * 3)
    async with connect(site.port) as connection:
        for tokens, status in ((3, 200), (4, 413)):
            body = chat(logprobs=True, top_logprobs=5, max_tokens=tokens, n=2)
            connection.ask("POST", CHAT, body)
            answer = await connection.answer()
            assert answer.status == status
        assert answer.error["param"] == "top_logprobs"
        assert "more than 36 logprobs" in answer.error["message"]
        connection.ask("POST", CHAT, body | {"stream": True})
        assert (await connection.answer()).status == 200
