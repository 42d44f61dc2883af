"""Conversion of Anthropic's messages to messages of a chat."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dynamo.application.openai.chat_messages import (
    MAX_MESSAGES,
    Conversation,
    check_parts,
    leave_out_of_result,
    read_str,
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

BlockReader = Callable[[dict[str, Any], str], str]
"""Returns the text of a block, whose field in errors it gets."""


def add_messages(conversation: Conversation, messages: list[dict[str, Any]]) -> None:
    """Add messages to those of a chat. Raises `InvalidRequest`, and `Unsupported` for blocks that
    are not text, thinking or tools. Tool results come before the text of their message."""
    if not messages:
        raise InvalidRequest("at least one is required", field="messages")
    check_size("messages", len(messages), MAX_MESSAGES)
    check_parts(list(messages), "messages", "blocks of all contents")
    for index, message in enumerate(messages):
        _add_message(conversation, message, f"messages[{index}]")


def join_text(content: Any, field: str, read: BlockReader | None = None) -> str:
    """Return a text, or the text that `read` returns of each block: by default of text, and of
    documents and results of text. Raises as `add_messages`."""
    if isinstance(content, str):
        return content
    read = read or _block_text
    return "\n".join(read(block, where) for block, where in _blocks(content, field))


def _add_message(conversation: Conversation, message: dict[str, Any], field: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{str(role)[:64]!r} is none of {', '.join(_ROLES)}", field=f"{field}.role"
        )
    place = f"{field}.content"
    if isinstance(content, str):
        conversation.add({"role": role, "content": content}, field)
    elif role == "assistant":
        conversation.add(_convert_answer(content, place), field)
    elif role == "system":
        conversation.add({"role": role, "content": join_text(content, place)}, field)
    else:
        _add_user(conversation, content, place)


def _add_user(conversation: Conversation, content: Any, field: str) -> None:
    texts: list[str] = []
    results = False
    for block, where in _blocks(content, field):
        if block["type"] == "tool_result":
            results = True
            conversation.add(_convert_result(block, where), where)
        else:
            texts.append(_block_text(block, where))
    if texts or not results:
        conversation.add({"role": "user", "content": "\n".join(texts)}, field)


def _convert_result(block: dict[str, Any], field: str) -> dict[str, Any]:
    call_id = read_str(block, "tool_use_id", field).removeprefix(CALL_PREFIX)
    content = block.get("content")
    text = join_text("" if content is None else content, f"{field}.content", _result_block_text)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _result_block_text(block: dict[str, Any], field: str) -> str:
    if block["type"] == "tool_reference":
        return read_str(block, "tool_name", field)
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
            thoughts.append(read_str(block, "thinking", where))
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
    function = {"name": read_str(block, "name", field), "arguments": text}
    call_id = read_str(block, "id", field).removeprefix(CALL_PREFIX)
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
        return read_str(block, "text", field)
    if kind == "search_result":
        heads = [read_str(block, name, field) for name in ("title", "source")]
        return "\n".join([*heads, join_text(block.get("content"), f"{field}.content")])
    source = block.get("source")
    source_kind = source.get("type") if isinstance(source, dict) else None
    if kind == "document" and documents and isinstance(source, dict):
        if source_kind == "text":
            return read_str(source, "data", f"{field}.source")
        if source_kind == "content":
            read = partial(_block_text, documents=False)
            return join_text(source.get("content"), f"{field}.source.content", read)
    name = f"{kind[:64]} ({str(source_kind)[:64]})" if source_kind else kind[:64]
    raise Unsupported(
        f"blocks of type {name} are not supported by a text model", hint="send text", field=field
    )
