"""The body of /v1/responses and its translation to a chat request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo.application.openai.body import decode_body
from dynamo.application.openai.chat import ChatParts, FieldNames
from dynamo.application.openai.generation_body import (
    STRUCTURE_FIELDS,
    GenerationBody,
    Neutral,
    UnsupportedFields,
    check_size,
)
from dynamo.application.openai.tools import MAX_TOOLS
from dynamo.application.responses.input_items import PREVIOUS, Item, ItemConversation, check_items
from dynamo.communication.http import Request
from dynamo.core.errors import InvalidRequest, Unsupported

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_ECHOED_CHARS = 1024
"""Limit of a text that the answer repeats, e.g. `prompt_cache_key`."""
LOGPROBS = "message.output_text.logprobs"
"""The item of `include` that asks for logprobs."""


class ReasoningOptions(msgspec.Struct, frozen=True):
    """The field `reasoning`."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """The field `text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """OpenAI's Responses request, with the additions of vLLM that chat has, too."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    text: TextFormat | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    n: Annotated[Any, Neutral(1)] = None
    truncation: Annotated[Any, Neutral("disabled")] = None
    conversation: Annotated[Any, Neutral()] = None
    prompt: Annotated[Any, Neutral()] = None
    context_management: Annotated[Any, Neutral([])] = None
    moderation: Annotated[Any, Neutral()] = None
    multi_agent: Annotated[Any, Neutral({"enabled": False})] = None


log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(ResponsesBody)
_unsupported = UnsupportedFields(ResponsesBody)
_OWN_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
"""The names of fields of a chat here."""


def read_responses_body(request: Request) -> ResponsesBody:
    """Return the body of a request. Raises `InvalidRequest`, `Unsupported`."""
    body = decode_body(_decoder, request)
    _unsupported.check(body)
    if body.input is None:
        raise InvalidRequest("required, but missing", field="input")
    if body.input == [] and not body.previous_response_id:
        raise InvalidRequest("at least one item is required", field="input")
    if body.metadata:
        check_size("metadata", len(body.metadata), MAX_METADATA)
        for key, value in body.metadata.items():
            check_size("metadata", len(key), MAX_METADATA_KEY, "characters in a key")
            check_size("metadata", len(value), MAX_METADATA_VALUE, "characters in a value")
    for name in ("prompt_cache_key", "safety_identifier", "previous_response_id"):
        if text := getattr(body, name):
            check_size(name, len(text), MAX_ECHOED_CHARS, "characters")
    if body.background and body.store is False:
        raise InvalidRequest("background can only be used when `store` is true", param="background")
    return body


def read_conversation(
    instructions: str | None, context: Sequence[Item], items: Sequence[Item], *, text: bool
) -> ItemConversation:
    """Return the messages of a request: instructions, the items of earlier responses, its own.
    `text`: the input is a text, no list. Raises `InvalidRequest` for too many."""
    if context:
        check_items([*context, *items])
    conversation = ItemConversation("call_id")
    if instructions is not None:
        conversation.add({"role": "system", "content": instructions}, "instructions")
    own = ["input"] if text else [f"input[{index}]" for index in range(len(items))]
    conversation.add_items([*context, *items], [PREVIOUS] * len(context) + own)
    return conversation


def chat_parts(body: ResponsesBody, conversation: ItemConversation) -> ChatParts:
    """Return the chat with the same meaning. Raises `InvalidRequest`, `Unsupported`."""
    tools = _function_tools(body, conversation) if body.tools or conversation.tools else []
    logprobs = (body.include and LOGPROBS in body.include) or body.top_logprobs
    format_names = _apply_format(body)
    return ChatParts(
        fields=body,
        messages=conversation.messages,
        max_tokens=body.max_output_tokens,
        top_logprobs=(body.top_logprobs or 0) if logprobs else None,
        tools=[_chat_tool(tool) for tool, _ in tools] if tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        template_args=body.chat_template_kwargs,
        names=FieldNames(
            lambda: (
                format_names
                | _OWN_NAMES
                | conversation.names()
                | {f"tools[{number}].function": place for number, (_, place) in enumerate(tools)}
            )
        ),
    )


def _apply_format(body: ResponsesBody) -> dict[str, str]:
    """Move `text.format` to `response_format`. Returns the client's names of that."""
    if body.text is None or body.text.format is None:
        return {}
    if any(getattr(body, name) is not None for name in STRUCTURE_FIELDS):
        raise InvalidRequest(
            "an answer has one structured output",
            hint="leave out response_format, structured_outputs and guided_...",
            field="text.format",
        )
    text_format = body.text.format
    body.response_format = text_format
    if text_format.get("type") == "json_schema":
        schema = {name: value for name, value in text_format.items() if name != "type"}
        body.response_format = {"type": "json_schema", "json_schema": schema}
    return dict.fromkeys(("response_format", "response_format.json_schema"), "text.format")


def _function_tools(body: ResponsesBody, conversation: ItemConversation) -> list[tuple[Item, str]]:
    """Return the functions among the tools, with their places. Raises `InvalidRequest`."""
    tools = [(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    tools += conversation.tools.values()
    check_size("tools", len(tools), MAX_TOOLS)
    return [(tool, place) for tool, place in tools if _is_function(tool)]


def _is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is a function. Nobody executes others here, so they are left out:
    Codex and others declare some in each request."""
    kind = tool.get("type", "function")
    if kind != "function":
        log.info("tool left out", extra={"fields": {"type": str(kind)[:64]}})
    return bool(kind == "function")


def _chat_tool(tool: Mapping[str, Any]) -> Item:
    """Return a flat tool as chat requests have it."""
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a choice without tools that are no functions. Raises `Unsupported` for other kinds."""
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        raise Unsupported(
            f"{str(kind)[:64]!r} is not supported",
            hint="send auto, none, required, or an object of type function or allowed_tools",
            field="tool_choice.type",
        )
    if kind == "function" or not isinstance(choice, dict):
        return choice
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequest("expected a list", field="tool_choice.tools")
    check_size("tool_choice.tools", len(tools), MAX_TOOLS)
    tools = [tool for tool in tools if not isinstance(tool, dict) or _is_function(tool)]
    return {"type": kind, "mode": choice.get("mode", "auto"), "tools": tools}
