"""Anthropic's Messages API, asked by the official `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.application.messages.handler import ANTHROPIC_ERRORS
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, NoWorkers, Overloaded, WorkerFailed
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ChatRequest,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started

anthropic: Any = pytest.importorskip("anthropic")

HI: Any = [{"role": "user", "content": "one two three"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
BIG = 12345678901234567890123


@pytest.fixture
async def client(site: Any) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="k", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def install(site: Any, monkeypatch: Any) -> Any:
    """Return a function that makes the site answer with reasoning, text and calls."""

    def install(end: TextFinish, *, cut: bool = False, error: Exception | None = None) -> None:
        async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
            site.processor.requests.append(request)
            reply.prompt(30)
            reply.begin(0, Started("w", cached_tokens=20))
            reply.event(0, ReasoningDelta("Let me "))
            reply.event(0, ReasoningDelta("think."))
            reply.text(0, "So.")
            if error is not None:
                raise error
            reply.event(0, CallBegun(0, "call_1", "f"))
            reply.event(0, ArgumentsDelta(0, '{"a": '))
            reply.event(0, ArgumentsDelta(0, f"{BIG}}}"))
            reply.event(0, CallEnded(0))
            reply.event(0, CallBegun(1, "call_2", "g"))
            if not cut:
                reply.event(0, CallEnded(1))
            reply.finish(0, end)

        monkeypatch.setattr(site.processor, "chat", chat)

    return install


async def ask(client: Any, **fields: Any) -> Any:
    return await client.messages.create(
        **{"model": "words", "max_tokens": 100, "messages": HI} | fields
    )


async def test_a_whole_message(client: Any, install: Any) -> None:
    install(TextFinish("tool_calls", 9, reasoning_tokens=4))
    raw = await client.messages.with_raw_response.create(
        model="words", max_tokens=100, messages=HI, tools=[TOOL]
    )
    message = await raw.parse()
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == message._request_id
    assert message.id == f"msg_{message._request_id}"
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me think.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "So.")
    assert (first.id, first.name, first.input) == ("toolu_call_1", "f", {"a": BIG})
    assert (second.id, second.name, second.input) == ("toolu_call_2", "g", {})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (10, 20)
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 9)


async def test_a_stream_is_put_together_as_the_whole_message(client: Any, install: Any) -> None:
    install(TextFinish("tool_calls", 9))
    whole = await ask(client, tools=[TOOL])
    async with client.messages.stream(
        model="words", max_tokens=100, messages=HI, tools=[TOOL]
    ) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in whole.content
    ]
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage == whole.usage
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_the_events_of_a_stream(site: Any, connect: Any, install: Any) -> None:
    install(TextFinish("length", 9), cut=True)
    async with connect(site.port) as connection:
        body = {"model": "words", "messages": HI, "max_tokens": 9, "stream": True}
        connection.ask("POST", "/v1/messages", body)
        answer = await connection.answer()
    assert answer.headers["request-id"]
    assert b"[DONE]" not in answer.body
    lines = answer.body.decode().split("\n\n")[:-1]
    events = [json.loads(line.partition("data: ")[2]) for line in lines]
    assert [line.splitlines()[0] for line in lines] == [f"event: {e['type']}" for e in events]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert (start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (10, 0)
    deltas = [
        (event["index"], event["delta"]["type"])
        for event in events
        if event["type"] == "content_block_delta"
    ]
    assert deltas == [
        *[(0, "thinking_delta")] * 2,
        (0, "signature_delta"),
        (1, "text_delta"),
        *[(2, "input_json_delta")] * 2,
    ]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 9


async def test_a_cut_call_stands_in_the_stream_and_in_the_whole_message(
    client: Any, install: Any
) -> None:
    install(TextFinish("length", 9), cut=True)
    message = await ask(client, tools=[TOOL])
    async with client.messages.stream(
        model="words", max_tokens=100, messages=HI, tools=[TOOL]
    ) as stream:
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in message.content
    ]
    assert message.content[-1].to_dict()["name"] == "g"
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize("own_id", ["call_1", "functions.f:0", "aB3dE6gH9", "toolu_01A"])
async def test_ids_of_calls_come_back_to_the_model_as_its_own(
    site: Any, client: Any, monkeypatch: Any, own_id: str
) -> None:
    async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
        site.processor.requests.append(request)
        reply.prompt(30)
        reply.begin(0, Started("w"))
        for event in (CallBegun(0, own_id, "f"), ArgumentsDelta(0, "{}"), CallEnded(0)):
            reply.event(0, event)
        reply.finish(0, TextFinish("tool_calls", 9))

    monkeypatch.setattr(site.processor, "chat", chat)
    message = await ask(client, tools=[TOOL])
    call_id = message.content[0].id
    assert call_id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "18"}
    answer = {"role": "assistant", "content": message.content}
    await ask(client, messages=[*HI, answer, {"role": "user", "content": [result]}], tools=[TOOL])
    *_, answered, returned = site.processor.requests[-1].messages
    assert answered["tool_calls"][0]["id"] == returned["tool_call_id"] == own_id


@pytest.mark.parametrize(
    ("stop", "reason", "sequence"),
    [("END", "stop_sequence", "END"), ("own", "end_turn", None), (7, "end_turn", None)],
)
async def test_reasons_to_stop(
    site: Any, client: Any, monkeypatch: Any, stop: Any, reason: str, sequence: Any
) -> None:
    async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
        assert request.options.stop == ("END",)
        reply.prompt(1)
        reply.begin(0, Started())
        reply.text(0, "a")
        reply.finish(0, TextFinish("stop", 1, stop))

    monkeypatch.setattr(site.processor, "chat", chat)
    message = await ask(client, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_conversations_reach_the_processor(site: Any, client: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    results = [
        {"type": "text", "text": "And now?"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "18"}]},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": "down"},
    ]
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, **cached},
        {"type": "tool_use", "id": "c2", "name": "f", "input": {}},
    ]
    document = {"type": "text", "media_type": "text/plain", "data": "page"}
    question = [{"type": "text", "text": "Hi", **cached}, {"type": "document", "source": document}]
    await ask(
        client,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "kind.", **cached}],
        messages=[
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
        ],
        tools=[TOOL | cached | {"strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0.5, "top_k": 7},
        metadata={"user_id": "u"},
    )
    request = site.processor.requests[-1]
    system, user, assistant, first, second, last = request.messages
    assert system == {"role": "system", "content": "Be\nkind."}
    assert user["content"] == "Hi\npage"
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == ['{"a": 1}', "{}"]
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "c1", "18")
    assert second["content"] == "Error: down"
    assert last == {"role": "user", "content": "And now?"}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert request.tools == ({"type": "function", "function": function},)
    assert not request.parallel_tool_calls
    assert request.options.sampling.temperature == 0.5
    assert request.options.sampling.top_k == 7


async def test_a_begun_answer_is_continued(site: Any, client: Any) -> None:
    begun = [*HI, {"role": "assistant", "content": "One,"}]
    await ask(client, messages=begun)
    await ask(client, messages=[*begun, *HI])
    continued, answered = site.processor.requests[-2:]
    assert (continued.continue_final, continued.add_generation_prompt) == (True, False)
    assert (answered.continue_final, answered.add_generation_prompt) == (False, True)


async def test_thinking_effort_and_formats_reach_the_processor(site: Any, client: Any) -> None:
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    on = {"enable_thinking": True, "thinking": True}
    for thinking, args in (
        ({"type": "disabled"}, off),
        ({"type": "enabled", "budget_tokens": 1024}, on),
        ({"type": "adaptive"}, on),
    ):
        await ask(client, thinking=thinking)
        request = site.processor.requests[-1]
        assert request.template_args == args
        limited = request.options.structured
        assert (limited is not None) == ("budget_tokens" in thinking)
        if limited is not None:
            assert (limited.kind, limited.reasoning_limit, limited.soft_limit) == (
                *("text", 1024),
                True,
            )
    await ask(
        client,
        output_config={
            "effort": "high",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    )
    request = site.processor.requests[-1]
    assert request.template_args == {"reasoning_effort": "high"}
    assert request.options.structured.kind == "json_schema"


async def test_tokens_are_counted(site: Any, client: Any) -> None:
    count = await client.messages.count_tokens(
        model="words", messages=HI, system="s", tools=[TOOL], thinking={"type": "disabled"}
    )
    assert count.input_tokens == 3


def image(source: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


def result(call_id: str) -> Any:
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id}]}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}],
                    }
                ]
            },
            "the last one calls tools",
        ),
        ({"messages": result("c9")}, r"messages\[0\].content\[0\].tool_use_id: .* 'c9'"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "leave response_format"),
        ({"messages": image({"type": "base64", "data": "x"})}, r"image \(base64\)"),
        ({"messages": image({"type": "url", "url": "http://x/y"})}, r"image \(url\)"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [TOOL] * 2}, r"tools\[1\].name: 'f' is the name"),
        ({"tools": [{"type": "web_search_20250305"}, *([TOOL] * 2)]}, r"tools\[2\].name: 'f' is"),
        ({"tools": [TOOL | {"name": f"f{n}"} for n in range(129)]}, "129"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_2025"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g' is not among"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"effort": "x" * 1025}}, "output_config.effort: 1,025"),
        ({"extra_body": {"output_format": {"type": "json_schema"}}}, r"output_format\.schema"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread"),
        ({"extra_body": {"compaction": {"type": "enabled"}}}, "compaction"),
        ({"stop_sequences": [""]}, "stop_sequences: an empty string"),
    ],
)
async def test_wrong_requests_cost_no_worker_anything(
    site: Any, client: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        await ask(client, **fields)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["request_id"] == caught.value.request_id
    assert not site.processor.requests


async def test_errors_have_anthropic_s_types(
    open_site: Any, connect: Any, monkeypatch: Any
) -> None:
    site = await open_site(api_keys=["good"])
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="bad", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(client)
        assert caught.value.body["error"]["type"] == "authentication_error"
    for credentials in ({"api_key": "good"}, {"auth_token": "good"}):
        async with anthropic.AsyncAnthropic(
            base_url=site.url, max_retries=0, **credentials
        ) as client:
            assert (await ask(client, max_tokens=3)).content[0].text == "one two three "
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="good", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
            await ask(client, model="no-such-model")
        site.processor.fails = "before"
        with pytest.raises(anthropic.APIStatusError) as failed:
            await ask(client, stream=True)
        assert failed.value.status_code == 529
        assert failed.value.body["error"]["type"] == "overloaded_error"
        assert failed.value.response.headers["retry-after"]
        monkeypatch.setattr(site.processor, "fails", "")
        with pytest.raises(anthropic.BadRequestError, match="timeout"):
            await ask(client, extra_headers={"x-dynamo-timeout": "soon"})


@pytest.mark.parametrize("error", [WorkerFailed("the worker died"), InvalidRequest("wrong")])
async def test_an_error_within_a_stream_is_an_event(
    client: Any, install: Any, error: Exception
) -> None:
    install(TextFinish("stop", 1), error=error)

    async def read() -> None:
        async with client.messages.stream(model="words", max_tokens=9, messages=HI) as stream:
            assert await anext(stream.text_stream) == "So."
            await stream.until_done()

    with pytest.raises(anthropic.APIStatusError, match=str(error)):
        await read()


async def test_closing_a_stream_cancels_the_request(site: Any, client: Any) -> None:
    stream = await ask(client, stream=True, max_tokens=10_000_000)
    await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(site.processor.cancelled.wait(), 30)


def test_which_errors_are_overloads() -> None:
    assert ANTHROPIC_ERRORS.status_of(NoWorkers("x")) == 529
    assert ANTHROPIC_ERRORS.status_of(Overloaded("x")) in (429, 529)
