"""The bodies of /v1/messages and /v1/messages/count_tokens, as chat requests."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo.application.messages.conversation import add_messages, join_text
from dynamo.application.openai.chat import ChatParts, FieldNames
from dynamo.application.openai.chat_messages import Conversation, check_parts
from dynamo.application.openai.generation_body import (
    GenerationBody,
    Neutral,
    UnsupportedFields,
    check_size,
)
from dynamo.application.openai.tools import MAX_TOOLS
from dynamo.core.errors import InvalidRequest, Unsupported

log = logging.getLogger(__name__)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TokenCountBody(msgspec.Struct, kw_only=True):
    """The body of /v1/messages/count_tokens, with Anthropic's fields; None means absent."""

    model: Annotated[str, Meta(min_length=1)]
    messages: list[dict[str, Any]]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    mcp_servers: Annotated[Any, Neutral([])] = None
    container: Annotated[Any, Neutral()] = None
    thread: Annotated[Any, Neutral()] = None
    compaction: Annotated[Any, Neutral()] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None
    structured_outputs: Annotated[Any, Neutral({})] = None
    guided_json: Annotated[Any, Neutral()] = None
    guided_regex: Annotated[Any, Neutral()] = None
    guided_choice: Annotated[Any, Neutral()] = None
    guided_grammar: Annotated[Any, Neutral()] = None


class MessagesBody(TokenCountBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    metadata: dict[str, Any] | None = None


_unsupported = UnsupportedFields(TokenCountBody)
_BILLING_LINE = re.compile(r"(?m)^x-anthropic-billing-header:[^\n]*\n*")
"""A line of Claude Code's system prompt, which differs in each request. No cached prefix would be
found behind it. Gateways put their own text before it."""


def prompt_parts(body: TokenCountBody) -> ChatParts:
    """Return the chat whose prompt the body describes. Raises `InvalidRequest`, `Unsupported`."""
    _unsupported.check(body)
    conversation = Conversation("tool_use_id")
    if body.system is not None:
        check_parts([body.system], "system")
        system = _BILLING_LINE.sub("", join_text(body.system, "system"))
        if system:
            conversation.add({"role": "system", "content": system}, "system")
    add_messages(conversation, body.messages)
    last = conversation.messages[-1]
    chat = ChatParts(
        fields=GenerationBody(model=body.model),
        soft_thinking_budget=True,  # clients must send a budget
        messages=conversation.messages,
        continue_final=last["role"] == "assistant" and "tool_calls" not in last,
    )
    places: list[str] = []
    if body.tools:
        check_size("tools", len(body.tools), MAX_TOOLS)
        chat.tools, places = _convert_tools(body.tools)
    if body.tool_choice is not None:
        chat.tool_choice = _convert_choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.get("disable_parallel_tool_use")
    _apply_thinking(body, chat)
    chat.names = FieldNames(lambda: _field_names(body) | conversation.names() | _tool_names(places))
    return chat


def answer_parts(body: MessagesBody) -> ChatParts:
    """Return the chat that answers the body. Raises `InvalidRequest`, `Unsupported`."""
    chat = prompt_parts(body)
    if "tool_calls" in chat.messages[-1]:
        raise InvalidRequest(
            "the last one calls tools",
            hint="send their results in a user message",
            field="messages",
        )
    fields = chat.fields
    chat.max_tokens, fields.stream = body.max_tokens, body.stream
    fields.temperature, fields.top_p, fields.top_k = body.temperature, body.top_p, body.top_k
    fields.stop = body.stop_sequences or None
    user = (body.metadata or {}).get("user_id")
    fields.user = user if isinstance(user, str) else None
    output_format = (body.output_config or {}).get("format") or body.output_format
    if output_format is not None:
        fields.response_format = _convert_format(output_format, _format_name(body))
    return chat


def _field_names(body: TokenCountBody) -> dict[str, str]:
    """Return the names of fields of the body by those of a chat."""
    format_field = _format_name(body)
    return {
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": format_field,
        "response_format.json_schema": format_field,
    }


def _format_name(body: TokenCountBody) -> str:
    in_config = body.output_format is None or (body.output_config or {}).get("format")
    return "output_config.format" if in_config else "output_format"


def _tool_names(places: list[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for number, place in enumerate(places):
        names[f"tools[{number}].function"] = names[f"tools[{number}]"] = place
        names[f"tools[{number}].function.parameters"] = f"{place}.input_schema"
    return names


def _convert_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools with a schema, and their places. Tools of Anthropic's server are left out
    beside others, and refused alone."""
    kinds = [tool.get("type") or "custom" for tool in tools]
    places = [f"tools[{number}]" for number, kind in enumerate(kinds) if kind == "custom"]
    others = [str(kind)[:64] for kind in kinds if kind != "custom"]
    if not places:
        raise Unsupported(
            f"Anthropic's tool {others[0]!r} is not supported",
            hint="send tools with name and input_schema, and call them in the client",
            field="tools[0].type",
        )
    for kind in others:
        log.info("tool left out", extra={"fields": {"type": kind}})
    own = (tool for tool, kind in zip(tools, kinds, strict=True) if kind == "custom")
    return list(map(_convert_tool, own, places)), places


def _convert_tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("expected a JSON schema", field=f"{field}.input_schema")
    function = {"name": tool.get("name"), "parameters": schema}
    function |= {key: tool[key] for key in ("description", "strict") if key in tool}
    return {"type": "function", "function": function}


def _convert_choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    converted = _CHOICES.get(kind) if isinstance(kind, str) else None
    if converted is None:
        raise InvalidRequest("expected auto, any, tool or none", field="tool_choice.type")
    return converted


def _apply_thinking(body: TokenCountBody, chat: ChatParts) -> None:
    """Turn thinking on or off where the model's template can, and set its budget. The body's own
    `chat_template_kwargs` are stronger."""
    kind = None if body.thinking is None else body.thinking.get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise InvalidRequest("expected enabled, adaptive or disabled", field="thinking.type")
    effort = (body.output_config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("expected str", field="output_config.effort")
    chat.reasoning_effort = "none" if kind == "disabled" else effort
    if kind == "enabled" and body.thinking is not None:
        chat.fields.thinking_token_budget = _thinking_budget(body.thinking.get("budget_tokens"))
    on = {"enable_thinking": True, "thinking": True} if kind in ("enabled", "adaptive") else {}
    chat.template_args = on | (body.chat_template_kwargs or {})


def _thinking_budget(tokens: Any) -> int | None:
    if tokens is not None and (type(tokens) is not int or not 1 <= tokens <= 1 << 31):
        raise InvalidRequest(
            "expected a number of tokens, at least 1", field="thinking.budget_tokens"
        )
    return tokens


def _convert_format(output_format: Any, field: str) -> dict[str, Any]:
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise InvalidRequest("expected json_schema", field=f"{field}.type")
    schema = output_format.get("schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
