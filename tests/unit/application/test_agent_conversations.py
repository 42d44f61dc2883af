"""Conversations in the form of coding agents: what no model reads must not end them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from dynamo.application.messages.handler import ANTHROPIC_ERRORS
from dynamo.core.errors import ContextLengthExceeded

LOOK = {"name": "look", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20260209", "name": "web_search"}
SHELL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
HI: Any = [{"role": "user", "content": "one two three"}]
PIXEL = "iVBORw0KGgo="


@pytest.fixture
async def messages(site: Any) -> AsyncIterator[Any]:
    """A function that asks `/v1/messages` and returns what the model reads."""
    anthropic: Any = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="k", max_retries=0) as sdk:

        async def ask(history: list[Any], **fields: Any) -> Any:
            await sdk.messages.create(model="words", max_tokens=3, messages=history, **fields)
            return site.processor.requests[-1]

        yield ask


@pytest.fixture
async def client(site: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="k", max_retries=0) as client:
        yield client
    await site.application.close(0)


def result_of(content: list[Any]) -> list[Any]:
    """Return a conversation whose last message is the result of a call."""
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    return [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "image", "source": {"type": "base64", "data": PIXEL}},
            "[image left out: this model reads text only]",
        ),
        (
            {"type": "document", "source": {"type": "url", "url": "http://x/a.pdf"}},
            "[document left out: this model reads text only]",
        ),
        ({"type": "tool_reference", "tool_name": "fetch"}, "fetch"),
        (
            {
                "type": "search_result",
                "title": "Rain",
                "source": "http://x",
                "content": [{"type": "text", "text": "It rains."}],
            },
            "Rain\nhttp://x\nIt rains.",
        ),
    ],
)
async def test_a_tool_result_of_messages_is_text(messages: Any, block: Any, text: str) -> None:
    request = await messages(result_of([{"type": "text", "text": "Here:"}, block]), tools=[LOOK])
    assert request.messages[-1]["content"] == f"Here:\n{text}"


async def test_server_tools_are_left_out_beside_tools_of_the_client(messages: Any) -> None:
    history = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                {"type": "text", "text": "It rains."},
            ],
        },
        *HI,
    ]
    request = await messages(history, tools=[SEARCH, LOOK])
    assert [tool["function"]["name"] for tool in request.tools] == ["look"]
    assert [message["content"] for message in request.messages] == [
        "one two three",
        "It rains.",
        "one two three",
    ]


async def test_a_server_tool_that_is_forced_is_refused(messages: Any) -> None:
    with pytest.raises(Exception, match="'web_search' is not among") as caught:
        await messages(HI, tools=[SEARCH, LOOK], tool_choice={"type": "tool", "name": "web_search"})
    assert getattr(caught.value, "status_code", None) == 400


def test_a_prompt_that_is_too_long_is_reported_in_the_words_of_anthropic() -> None:
    error = ContextLengthExceeded("the prompt has 9 tokens", hint="shorten it")
    assert b'"prompt is too long: the prompt has 9 tokens (shorten it)"' in (
        ANTHROPIC_ERRORS.encode(error, "r")
    )


async def test_a_tool_runner_that_asks_for_a_thread_continues_without(
    site: Any,
) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=site.url, api_key="k", max_retries=0) as sdk:
        with pytest.raises(anthropic.BadRequestError, match="thread is not supported") as caught:
            await sdk.messages.create(
                model="words",
                max_tokens=3,
                messages=HI,
                extra_body={"thread": {"type": "continue", "previous_message_id": "msg_1"}},
            )
    details = caught.value.body["error"]["details"]
    assert details["error_code"] == "thread_unsupported_request"
    assert not site.processor.requests


async def test_tools_that_items_add_are_offered(client: openai.AsyncOpenAI, site: Any) -> None:
    added = SHELL | {"name": "patch", "description": "old"}
    custom = {"type": "custom", "name": "exec", "description": "Runs a program."}
    items: Any = [
        {"type": "additional_tools", "role": "developer", "tools": [added, custom]},
        *HI,
        {"type": "additional_tools", "role": "developer", "tools": [added | {"description": "d"}]},
    ]
    first = await client.responses.create(model="words", input=items, tools=[SHELL])
    await client.responses.create(model="words", input=HI, previous_response_id=first.id)
    before, after = (request.tools for request in site.processor.requests)
    assert [tool["function"]["name"] for tool in before] == ["shell", "patch"]
    assert [tool["function"]["description"] for tool in after] == ["d"]


@pytest.mark.parametrize(
    "kind", ["shell_call", "local_shell_call", "apply_patch_call", "computer_call"]
)
async def test_calls_of_built_in_tools_are_not_in_the_prompt(
    client: openai.AsyncOpenAI, site: Any, kind: str
) -> None:
    call = {"type": kind, "call_id": "c1", "status": "completed"}
    outputs: Any = [
        {"type": output, "call_id": "c1", "output": "x"}
        for output in (f"{kind}_output", "function_call_output")
    ]
    await client.responses.create(model="words", input=[*HI, call, *outputs, *HI])
    assert [message["role"] for message in site.processor.requests[-1].messages] == ["user", "user"]


async def test_allowed_tools_that_are_no_functions_are_left_out(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    search: Any = {"type": "web_search"}
    named = {"type": "function", "name": "shell"}
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [search, named]}
    await client.responses.create(
        model="words", input=HI, tools=[SHELL, SHELL | {"name": "x"}, search], tool_choice=choice
    )
    assert site.processor.requests[-1].callable_tools == ("shell",)


async def test_an_image_in_the_output_of_a_call_is_a_note(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [image]}
    items: Any = [*HI, call, output]
    await client.responses.create(model="words", input=items, tools=[SHELL])
    note = "[input_image left out: this model reads text only]"
    assert site.processor.requests[-1].messages[-1]["content"] == note


async def test_an_image_in_a_tool_message_is_a_note(client: openai.AsyncOpenAI, site: Any) -> None:
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [image]}
    history: Any = [*HI, {"role": "assistant", "tool_calls": [call]}, result]
    await client.chat.completions.create(model="words", messages=history, max_tokens=3)
    note = "[image_url left out: this model reads text only]"
    assert site.processor.requests[-1].messages[-1]["content"] == [{"type": "text", "text": note}]


def note(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def test_a_second_turn_of_claude_code_begins_with_the_first(messages: Any, site: Any) -> None:
    def system(nonce: str) -> list[Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.{nonce}; cc_entrypoint=sdk-cli;"
        return [note(line), note("You are an agent."), note("Read before you write.")]

    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "1\tone\n"}
    first = [
        {"role": "user", "content": [note("<system-reminder>\nDate\n"), note("Go") | cached]},
        {"role": "system", "content": "Available agents"},
    ]
    second = [
        {"role": "user", "content": [note("<system-reminder>\nDate\n"), note("Go")]},
        first[1],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result | cached, note("Keep on.")]},
    ]
    before = await messages(first, system=system("f2f"), tools=[LOOK])
    after = await messages(second, system=system("3d9"), tools=[LOOK])
    assert after.messages[: len(before.messages)] == before.messages
    assert [message["role"] for message in after.messages[3:]] == ["assistant", "tool", "user"]
    assert after.tools == before.tools


async def test_a_second_turn_of_codex_begins_with_the_first(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    def message(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    tools: Any = [SHELL, {"type": "web_search", "external_web_access": False}]
    first: Any = [message("developer", "Rules"), message("user", "Go")]
    second: Any = [
        *({**item, "id": f"msg_{number}"} for number, item in enumerate(first)),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        message("assistant", "I look.", "output_text"),
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "Exit code: 0"},
        message("user", "Keep on."),
    ]
    for turn, items in enumerate((first, second)):
        await client.responses.create(
            model="words",
            input=items,
            tools=tools,
            store=False,
            parallel_tool_calls=True,
            reasoning={"summary": "auto"},
            include=["reasoning.encrypted_content"],
            prompt_cache_key="thread",
            extra_body={"client_metadata": {"turn_id": str(turn)}},
        )
    before, after = (request.messages for request in site.processor.requests)
    assert after[: len(before)] == before
    assert [item["role"] for item in after[2:]] == ["assistant", "tool", "user"]


@pytest.mark.parametrize("before", ["", "Be brief."])
@pytest.mark.parametrize("as_blocks", [False, True])
async def test_the_line_of_claude_code_that_always_differs_is_left_out(
    messages: Any, as_blocks: bool, before: str
) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
    texts = [text for text in (before, line, "Be kind.") if text]
    blocks: Any = [{"type": "text", "text": text} for text in texts]
    system = blocks if as_blocks else "\n".join(texts)
    hello: Any = [{"role": "user", "content": f"What is {line}"}]
    request = await messages(hello, system=system)
    assert request.messages == (
        {"role": "system", "content": f"{before}\nBe kind.".strip()},
        hello[0],
    )


async def test_reasoning_items_in_a_row_are_one_reasoning(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    thoughts: Any = [
        {"type": "reasoning", "id": name, "summary": [{"type": "summary_text", "text": name}]}
        for name in ("first", "second", "third")
    ]
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    answer = {"role": "assistant", "content": "Sunny."}
    items = [*HI, *thoughts[:2], call, output, thoughts[2], answer, *HI]
    await client.responses.create(model="words", tools=[SHELL], input=items)
    messages = site.processor.requests[-1].messages
    reasoning = [message.get("reasoning_content") for message in messages]
    assert reasoning == [None, "first\nsecond", None, "third", None]
