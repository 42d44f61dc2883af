"""Large bodies: the number of their values is bounded, and long conversations and prompts pass."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from tests.unit.application.conftest import CONTEXT_TOKENS

from dynamo.communication.http import Request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CALL = {"id": "a", "function": {"name": "f", "arguments": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{}] * 20_000}
PAGES = {"type": "document", "source": {"type": "content", "content": [{}] * 20_000}}
FLAT_TOOL = {"type": "function", "name": "f", "input_schema": {}}
ALLOWED = {"mode": "auto", "tools": [FLAT_TOOL] * 129}

COUNTED = "the body has at least"
FILLER = "x" * 200_000


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {"messages": [{}] * 140_000}, 413, COUNTED),
        (COMPLETIONS, {"prompt": [[1]] * 140_000}, 413, COUNTED),
        (COMPLETIONS, {"prompt": [1] * 900_000}, 413, COUNTED),
        (CHAT, {"chat_template_kwargs": {str(key): 1 for key in range(300_000)}}, 413, COUNTED),
        (CHAT, {"messages": [{}] * 20_000}, 400, "messages: 20,000 entries, limit 16,384"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ["a"] * 10_000}] * 2},
            400,
            "messages: parts of all contents: 20,000 entries",
        ),
        (COMPLETIONS, {"prompt": [[1]] * 20_000}, 400, "20000 prompts times n 1 exceed 2048"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": b"x".decode() * 70_000 + "\udfff"}]},
            400,
            "",
        ),
    ],
    ids=range(8),
)
async def test_large_bodies_are_bounded(
    site: Any, connect: Any, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    async with connect(site.port) as connection:
        connection.ask("POST", path, {"model": "words", "messages": messages} | body)
        answer = await connection.answer()
        assert answer.status == status
        assert message in answer.error["message"]
        connection.ask("POST", CHAT, {"model": "words", "messages": messages})
        assert (await connection.answer()).status == 200
    assert gc.isenabled()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 9000}] * 2}, "calls"),
        (RESPONSES, {"input": user([{}] * 20_000)}, "input: parts of all items: 20,000"),
        (RESPONSES, {"input": [*user("a"), {"type": "reasoning", "summary": [{}] * 20_000}]}, "pa"),
        (RESPONSES, {"tools": [FLAT_TOOL] * 129}, "tools: 129"),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", **ALLOWED}}, "tools: 129"),
        (MESSAGES, {"messages": [{}] * 20_000}, "messages: 20,000 entries, limit 16,384"),
        (MESSAGES, {"messages": user([{}] * 9000) * 2}, "messages: blocks of all contents: 18,000"),
        (MESSAGES, {"messages": user([RESULT])}, "messages: blocks of all contents: 20,001"),
        (MESSAGES, {"messages": user([PAGES])}, "messages: blocks of all contents: 20,001"),
        (MESSAGES, {"system": [{}] * 20_000}, "system: 20,000 entries"),
        (MESSAGES, {"tools": [FLAT_TOOL] * 129}, "tools: 129"),
        (MESSAGES + "/count_tokens", {"messages": user([{}] * 20_000)}, "20,000"),
    ],
)
async def test_conversations_are_bounded_before_they_are_converted(
    site: Any, connect: Any, path: str, body: dict[str, Any], message: str
) -> None:
    common = {"model": "words", "messages": user("a"), "input": "a", "max_tokens": 1}
    async with connect(site.port) as connection:
        connection.ask("POST", path, common | body)
        answer = await connection.answer()
    assert (answer.status, message in answer.json["error"]["message"]) == (400, True)
    assert not site.processor.requests


async def test_nesting_is_the_client_s_mistake(site: Any, connect: Any, caplog: Any) -> None:
    block: dict[str, Any] = {"type": "text", "text": "x"}
    for _ in range(250):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    deep = b'{"a":' * 940 + b"1" + b"}" * 940
    schema = b'"input":"x","tools":[{"type":"function","name":"f","parameters":' + deep + b"}]"
    bodies = [
        (MESSAGES, json.dumps({"max_tokens": 1, "messages": user([block])}).encode()[1:]),
        (RESPONSES, schema + b"}"),
    ]
    async with connect(site.port) as connection:
        for path, body in bodies:
            connection.ask("POST", path, b'{"model":"words",' + body)
            assert (await connection.answer()).status in (200, 400)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("at", [0, 70_000, 1_200_000])
async def test_large_bodies_must_be_utf8(site: Any, connect: Any, at: int) -> None:
    text = bytearray(b'{"model":"words","messages":[{"role":"user","content":"a"}],"user":"')
    text += b"u" * at + b"\xff" + b"u" * (1_400_000 - at) + b'"}'
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, bytes(text))
        answer = await connection.answer()
        assert (answer.status, "not UTF-8" in answer.error["message"]) == (400, True)


async def test_long_conversations_and_prompts_of_ids_pass(site: Any, connect: Any) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": [1] * 5000})}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, "two"]},
        {"role": "assistant", "content": "{[,:" * 10},
    ] * 4000
    turns += [{"role": "assistant", "content": "", "tool_calls": [call]}] * 20
    turns += [{"role": "user", "content": "last"}]
    async with connect(site.port) as connection:
        connection.ask("POST", CHAT, {"model": "words", "messages": turns, "max_tokens": 1})
        assert (await connection.answer()).status == 200
        ids = [[12_345] * CONTEXT_TOKENS] * 2
        connection.ask("POST", COMPLETIONS, {"model": "words", "prompt": ids, "max_tokens": 1})
        assert (await connection.answer()).status == 200
    assert site.processor.requests[0].messages[-2]["tool_calls"] == [call]
    assert [len(request.prompt) for request in site.processor.requests[1:]] == [
        4 * CONTEXT_TOKENS
    ] * 2


async def test_a_body_is_dropped_once_it_is_decoded(site: Any, connect: Any) -> None:
    site.processor.gate.clear()
    async with connect(site.port) as connection:
        body = {
            "model": "words",
            "messages": [{"role": "user", "content": "a"}],
            "zz": "x" * 300_000,
        }
        connection.ask("POST", CHAT, body)
        await site.processor.entered.wait()
        assert site.http.budget.held_bytes == 0
        site.processor.gate.set()
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", [0, 19])
async def test_no_prompt_is_answered_if_one_of_several_is_refused(
    site: Any, connect: Any, stream: bool, bad: int
) -> None:
    prompts = ["a b"] * 20
    prompts[bad] = "a " * (CONTEXT_TOKENS + 1)
    async with connect(site.port) as connection:
        body = {"model": "words", "prompt": prompts, "stream": stream}
        connection.ask("POST", COMPLETIONS, body)
        answer = await connection.answer()
    assert (answer.status, answer.error["message"]) == (400, "too long")
    assert not site.processor.entered.is_set(), "no prompt was sent to a worker"


@pytest.mark.parametrize("encodes_first", [False, True])
async def test_a_large_body_counts_until_all_prompts_are_encoded(
    site: Any, connect: Any, encodes_first: bool
) -> None:
    processor = site.processor
    processor.gate.clear()
    processor.encoder_free.clear()
    processor.encodes_first = encodes_first
    async with connect(site.port) as connection:
        connection.ask("POST", COMPLETIONS, {"prompt": ["a", "b"], "model": "words", "zz": FILLER})
        async with asyncio.timeout(5):
            while len(processor.requests) < 2:
                await asyncio.sleep(0.01)
        assert site.http.budget.held_bytes > len(FILLER)
        processor.encoder_free.set()
        async with asyncio.timeout(5):
            while site.http.budget.held_bytes:
                await asyncio.sleep(0.01)
        processor.gate.set()
        assert (await connection.answer()).status == 200


async def test_a_large_body_counts_no_more_when_its_client_leaves(site: Any, connect: Any) -> None:
    site.processor.encoder_free.clear()
    async with connect(site.port) as connection:
        connection.ask("POST", COMPLETIONS, {"prompt": "a", "model": "words", "zz": FILLER})
        async with asyncio.timeout(5):
            while not site.processor.requests:
                await asyncio.sleep(0.01)
        assert site.http.budget.held_bytes > len(FILLER)
    async with asyncio.timeout(5):
        while site.http.budget.held_bytes:
            await asyncio.sleep(0.01)


async def test_work_on_a_large_body_pauses_between_its_steps(
    site: Any, connect: Any, monkeypatch: Any
) -> None:
    pauses: list[str] = []

    async def pause(request: Request) -> None:
        pauses.append(request.path)

    monkeypatch.setattr(Request, "pause", pause)
    async with connect(site.port) as connection:
        for text, count in (("short", 0), ("x" * 70_000, 1)):
            for path, steps in ((CHAT, 1), (MESSAGES, 3), (RESPONSES, 3)):
                body = {"model": "words", "max_tokens": 1, "messages": user(text), "input": text}
                connection.ask("POST", path, body)
                assert (await connection.answer()).status == 200
                assert pauses == [path] * steps * count
                pauses.clear()
