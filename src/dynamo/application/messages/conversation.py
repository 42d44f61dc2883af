"""Conversion of Anthropic's messages to messages of a chat."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterator
from typing import Any

from dynamo.application.openai.chat_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    Conversation,
    leave_out_of_result,
)
from dynamo.application.openai.generation_body import check_size
from dynamo.core.errors import InvalidRequest, Unsupported

log = logging.getLogger(__name__)

_ROLES = ("user", "assistant", "system")
CALL_PREFIX = "toolu_"
"""The beginning of ids of calls, which clients check. The model's own ids have none."""
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_SERVER_RESULT = "_tool_result"
"""Blocks of tools that Anthropic's server executes: their types, and how those of results end."""


def check_conversation(messages: list[dict[str, Any]], system: Any) -> None:
    """Raise `InvalidRequest` for too many messages or blocks, which are converted without a
    pause."""
    check_size("messages", len(messages), MAX_MESSAGES)
    blocks = sum(_block_counts([message.get("content") for message in messages]))
    check_size("messages", blocks, MAX_PARTS, what="blocks of all contents")
    check_size("system", sum(_block_counts([system])), MAX_PARTS)


def _block_counts(contents: list[Any]) -> Iterator[int]:
    """Yield the lengths of contents and of those in their blocks."""
    while contents:
        content = contents.pop()
        if isinstance(content, list):
            yield len(content)
            blocks = [block for block in content if isinstance(block, dict)]
            sources = [block.get("source") for block in blocks]
            blocks += [source for source in sources if isinstance(source, dict)]
            contents += [block["content"] for block in blocks if "content" in block]


def add_messages(conversation: Conversation, messages: list[dict[str, Any]]) -> None:
    """Add messages to those of a chat. Raises `InvalidRequest`, and `Unsupported` for blocks that
    are not text, thinking or tools. Tool results come before the text of their message."""
    if not messages:
        raise InvalidRequest("at least one is required", field="messages")
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        for chat_message in _convert_message(message, field, call_ids):
            conversation.add(chat_message, field)
            call_ids.update(call["id"] for call in chat_message.get("tool_calls", ()))


def join_text(content: Any, field: str, *, documents: bool = True) -> str:
    """Return a text, or the text of blocks that are all text, or `documents` of text. Raises as
    `add_messages`."""
    if isinstance(content, str):
        return content
    return "\n".join(
        _block_text(block, where, documents=documents) for block, where in _blocks(content, field)
    )


def _convert_message(
    message: dict[str, Any], field: str, call_ids: Container[str]
) -> Iterator[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{str(role)[:64]!r} is none of {', '.join(_ROLES)}", field=f"{field}.role"
        )
    field = f"{field}.content"
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _convert_answer(content, field)
    elif role == "system":
        yield {"role": role, "content": join_text(content, field)}
    else:
        yield from _convert_user(content, field, call_ids)


def _convert_user(content: Any, field: str, call_ids: Container[str]) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    results = False
    for block, where in _blocks(content, field):
        if block["type"] == "tool_result":
            results = True
            yield _convert_result(block, where, call_ids)
        else:
            texts.append(_block_text(block, where))
    if texts or not results:
        yield {"role": "user", "content": "\n".join(texts)}


def _convert_result(block: dict[str, Any], field: str, call_ids: Container[str]) -> dict[str, Any]:
    shown_id = _read_str(block, "tool_use_id", field)
    call_id = shown_id.removeprefix(CALL_PREFIX)
    if call_id not in call_ids:
        raise InvalidRequest(
            f"no earlier message has a tool_use with the id {shown_id[:64]!r}",
            hint="send the assistant's message with the tool_use before its result",
            field=f"{field}.tool_use_id",
        )
    content = block.get("content")
    text = "" if content is None else _result_text(content, f"{field}.content")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _result_text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_result_block_text(block, where) for block, where in _blocks(content, field))


def _result_block_text(block: dict[str, Any], field: str) -> str:
    if block["type"] == "tool_reference":
        return _read_str(block, "tool_name", field)
    try:
        return _block_text(block, field)
    except Unsupported:
        return leave_out_of_result(block["type"])


def _convert_answer(content: Any, field: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in _blocks(content, field):
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_read_str(block, "thinking", where))
        elif kind == "tool_use":
            calls.append(_convert_call(block, where))
        elif kind in _SERVER_CALLS or kind.endswith(_SERVER_RESULT):
            log.info("block left out", extra={"fields": {"type": kind[:64]}})
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_call(block: dict[str, Any], field: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise InvalidRequest("expected an object", field=f"{field}.input")
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": _read_str(block, "name", field), "arguments": text}
    call_id = _read_str(block, "id", field).removeprefix(CALL_PREFIX)
    return {"id": call_id, "type": "function", "function": function}


def _blocks(content: Any, field: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the blocks of a content with their names in errors."""
    if not isinstance(content, list):
        raise InvalidRequest("expected str or a list of blocks", field=field)
    for number, block in enumerate(content):
        where = f"{field}[{number}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest("expected an object with a type", field=where)
        yield block, where


def _block_text(block: dict[str, Any], field: str, *, documents: bool = True) -> str:
    kind = block["type"]
    if kind == "text":
        return _read_str(block, "text", field)
    if kind == "search_result":
        heads = [_read_str(block, name, field) for name in ("title", "source")]
        return "\n".join([*heads, join_text(block.get("content"), f"{field}.content")])
    source = block.get("source")
    source_kind = source.get("type") if isinstance(source, dict) else None
    if kind == "document" and documents and isinstance(source, dict):
        if source_kind == "text":
            return _read_str(source, "data", f"{field}.source")
        if source_kind == "content":
            return join_text(source.get("content"), f"{field}.source.content", documents=False)
    name = f"{kind[:64]} ({str(source_kind)[:64]})" if source_kind else kind[:64]
    raise Unsupported(
        f"blocks of type {name} are not supported by a text model", hint="send text", field=field
    )


def _read_str(block: dict[str, Any], key: str, field: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequest("expected str", field=f"{field}.{key}")
    return value
