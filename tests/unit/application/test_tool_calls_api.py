"""Reasoning and tool calls of chat answers: their JSON, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.application.test_chat_api import ask

from dynamo.core.context import Context
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

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.fixture
def answer_with_calls(site: Any, monkeypatch: Any) -> Any:
    """Return a function that makes the site answer with reasoning, text and calls."""

    def install(*, text: str = "So.", cut: bool = False) -> None:
        async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
            site.processor.requests.append(request)
            reply.prompt(3)
            reply.begin(0, Started())
            reply.event(0, ReasoningDelta("Let me "))
            reply.event(0, ReasoningDelta("think."))
            if text:
                reply.text(0, text)
            reply.event(0, CallBegun(0, "call_1", "f"))
            reply.event(0, ArgumentsDelta(0, '{"a": '))
            reply.event(0, ArgumentsDelta(0, "1}"))
            reply.event(0, CallEnded(0))
            reply.event(0, CallBegun(1, "call_2", "g"))
            reply.event(0, ArgumentsDelta(1, '{"b'))
            if not cut:
                reply.event(0, ArgumentsDelta(1, '": 2}'))
                reply.event(0, CallEnded(1))
            reply.finish(0, TextFinish("length" if cut else "tool_calls", 9, reasoning_tokens=4))

        monkeypatch.setattr(site.processor, "chat", chat)

    return install


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


async def test_a_whole_answer(site: Any, connect: Any, answer_with_calls: Any) -> None:
    answer_with_calls()
    body = (await ask(connect, site, tools=TOOLS)).json
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Let me think.",
        "reasoning": "Let me think.",
        "tool_calls": [call(1, "f", '{"a": 1}'), call(2, "g", '{"b": 2}')],
    }
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_content_is_null_where_there_are_only_calls(
    site: Any, connect: Any, answer_with_calls: Any
) -> None:
    answer_with_calls(text="")
    body = (await ask(connect, site, tools=TOOLS)).json
    assert body["choices"][0]["message"]["content"] is None


async def test_a_stream(site: Any, connect: Any, answer_with_calls: Any) -> None:
    answer_with_calls()
    events = (await ask(connect, site, tools=TOOLS, stream=True)).events
    choices = [event["choices"][0] for event in events[:-1]]
    begun = [{"index": index, **call(index + 1, name, "")} for index, name in enumerate(("f", "g"))]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me ", "reasoning": "Let me "},
        {"reasoning_content": "think.", "reasoning": "think."},
        {"content": "So."},
        {"tool_calls": [begun[0]]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [begun[1]]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"b'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '": 2}'}}]},
        {},
    ]
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_call_that_is_cut_stands_in_the_stream_and_in_the_whole_answer(
    site: Any, connect: Any, answer_with_calls: Any
) -> None:
    answer_with_calls(cut=True)
    choice = (await ask(connect, site, tools=TOOLS)).json["choices"][0]
    assert choice["message"]["tool_calls"] == [call(1, "f", '{"a": 1}'), call(2, "g", '{"b')]
    assert choice["finish_reason"] == "length"
    events = (await ask(connect, site, tools=TOOLS, stream=True)).events
    *_, last_part, end = [event["choices"][0] for event in events[:-1]]
    assert last_part["delta"]["tool_calls"][0]["function"]["arguments"] == '{"b'
    assert end["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_the_field_of_reasoning_is_a_setting(
    open_site: Any, connect: Any, monkeypatch: Any, field: str
) -> None:
    site = await open_site(reasoning_field=field)

    async def chat(request: ChatRequest, context: Context, reply: TextReply) -> None:
        reply.prompt(1)
        reply.begin(0, Started())
        reply.event(0, ReasoningDelta("hm"))
        reply.finish(0, TextFinish("stop", 1))

    monkeypatch.setattr(site.processor, "chat", chat)
    message = (await ask(connect, site)).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", field: "hm"}


async def test_choices_of_tools_reach_the_processor(
    site: Any, connect: Any, answer_with_calls: Any
) -> None:
    answer_with_calls()
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    for choice, names in (
        ("auto", None),
        ("none", ()),
        ({"type": "allowed_tools", "allowed_tools": allowed}, ("g",)),
    ):
        assert (await ask(connect, site, tools=TOOLS, tool_choice=choice)).status == 200
        request = site.processor.requests[-1]
        assert (request.callable_tools, request.tools) == (names, tuple(TOOLS))
        assert request.parallel_tool_calls
    await ask(connect, site, tools=TOOLS, parallel_tool_calls=False)
    assert not site.processor.requests[-1].parallel_tool_calls


async def test_reasoning_of_earlier_answers_reaches_the_template_under_every_name(
    site: Any, connect: Any
) -> None:
    for content in ("4", None):
        earlier = {"role": "assistant", "content": content, "reasoning": "2 + 2"}
        messages = [earlier, {"role": "user", "content": "And?"}]
        assert (await ask(connect, site, messages=messages)).status == 200
        message = site.processor.requests[-1].messages[0]
        assert message["reasoning_content"] == message["thinking"] == "2 + 2"
        assert message["content"] == (content or "")


@pytest.mark.parametrize(("tier", "priority"), [("flex", -5), ("priority", 5), ("auto", 0)])
async def test_a_service_tier_is_a_priority_and_is_answered_back(
    open_site: Any, connect: Any, tier: str, priority: int
) -> None:
    site = await open_site(priority_range=(-5, 5))
    shown = None if tier == "auto" else tier
    whole = await ask(connect, site, service_tier=tier)
    streamed = await ask(connect, site, service_tier=tier, stream=True)
    assert whole.json.get("service_tier") == shown
    assert {event.get("service_tier") for event in streamed.events[:-1]} == {shown}
    assert [request.options.priority for request in site.processor.requests] == [priority] * 2


async def test_fields_that_clients_send_by_habit_are_accepted(site: Any, connect: Any) -> None:
    fields = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "u",
        "verbosity": "low",
        "prediction": None,
        "modalities": ["text"],
        "reasoning_effort": "low",
    }
    assert (await ask(connect, site, **fields)).status == 200
