"""Bad requests to /v1/responses: the field that the error names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
async def client(site: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="k", max_retries=0) as client:
        yield client
    await site.application.close(0)


NAMELESS: Any = {"type": "function", "name": "a b"}
ADDED: Any = {"type": "additional_tools", "tools": [WEATHER, NAMELESS]}
IMAGE = {"type": "input_image", "image_url": "http://example.com/cat.png"}
BAD_BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "at least one"),
    ({"tools": [WEATHER, WEATHER], "background": True}, "tools[1].name", "weather"),
    ({"input": [3]}, "input[0]", "object"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "wizard"),
    ({"input": [{"role": "user"}]}, "input[0].content", "expected"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "input_image"),
    ({"input": [{"type": "compaction"}]}, "input[0].type", "compaction"),
    ({"input": [{"type": "additional_tools"}]}, "input[0].tools", "list"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
        "no earlier message",
    ),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
        "web_search",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "only with"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tool name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "weather"),
    ({"tools": [{"type": "web_search"}, NAMELESS]}, "tools[1].name", "tool name"),
    ({"input": [{"role": "user", "content": "x"}, ADDED]}, "input[1].tools[1].name", "tool name"),
    ({"tools": [WEATHER] * 129}, "tools", "129"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "x"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}},
        "tool_choice",
        "tool_choice: expected mode",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
    (
        {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
        "text.format",
        "one structured output",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}},
        "text.format",
        "text.format.schema: expected a JSON schema",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type: expected"),
    ({"reasoning": {"effort": "x" * 1025}}, "reasoning.effort", "reasoning.effort: 1,025"),
    (
        {
            "instructions": "Be short.",
            "input": [
                {"type": "web_search_call"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
        },
        "input[1].call_id",
        "input[1].call_id: no earlier message",
    ),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    ({"multi_agent": {"enabled": True}}, "multi_agent", "not supported"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"background": True, "store": False}, "background", "store"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "513"),
    ({"previous_response_id": 7}, "previous_response_id", "str"),
]


@pytest.mark.parametrize(("body", "param", "text"), BAD_BODIES)
async def test_bad_input_names_its_field_and_reaches_no_worker(
    client: openai.AsyncOpenAI, site: Any, body: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(
            "/responses", body={"model": "words", "input": "x"} | body, cast_to=object
        )
    assert (caught.value.param, caught.value.request_id is not None) == (param, True)
    assert text in caught.value.message
    assert not site.processor.requests


async def test_tools_and_items_that_are_no_functions_are_left_out(
    client: openai.AsyncOpenAI, site: Any
) -> None:
    tools: Any = [WEATHER, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "user", "content": "y"},
    ]
    response = await client.responses.create(model="words", input=items, tools=tools)
    request = site.processor.requests[-1]
    assert [tool["function"]["name"] for tool in request.tools] == ["weather"]
    assert [message["role"] for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    [call] = request.messages[1]["tool_calls"]
    assert call["function"] == {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert len(response.tools) == 3
    stored = await client.responses.input_items.list(response.id, order="asc")
    assert [item.type for item in stored.data][3] == "web_search_call"
