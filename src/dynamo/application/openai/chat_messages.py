"""Conversion of clients' chat messages to messages for chat templates."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import msgspec

from dynamo.application.openai.generation_body import check_size
from dynamo.core.errors import InvalidRequest, Unsupported

log = logging.getLogger(__name__)

MAX_MESSAGES = 1 << 14
MAX_PARTS = 1 << 14
MAX_CALLS = 1 << 14
MAX_ARGUMENT_VALUES = 1 << 17
"""Limits of a conversation, which is converted without a pause."""

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names under which chat templates read the reasoning of earlier messages."""
PLAIN_FIELDS = 2
"""The fields of most messages: role and content."""
_NESTING_FIELDS = ("content", "output", "source", "summary", "tools")
"""Fields of a part or an item that have parts."""
_TEXT_PART_FIELDS = {"refusal": "refusal"} | dict.fromkeys(
    ("text", "input_text", "output_text"), "text"
)


class Conversation(msgspec.Struct):
    """The messages of a chat, and the field of the client's request that each comes from.
    `call_field`: the name in the results of calls of the calls' ids."""

    call_field: str
    messages: list[dict[str, Any]] = []
    fields: list[str] = []

    def add(self, message: dict[str, Any], field: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.fields.append(field)

    def names(self) -> dict[str, str]:
        """Return the client's field of each message by its path in a chat."""
        names: dict[str, str] = {}
        for number, field in enumerate(self.fields):
            names[f"messages[{number}]"] = field
            names[f"messages[{number}].tool_call_id"] = f"{field}.{self.call_field}"
        return names


def check_parts(contents: list[Any], field: str, what: str = "") -> None:
    """Raise `InvalidRequest` for contents with too many parts, which are converted without a pause:
    also in parts of parts."""
    count = 0
    while contents:
        content = contents.pop()
        if isinstance(content, list):
            count += len(content)
            contents += [part for part in content if isinstance(part, dict)]
        elif isinstance(content, dict):
            contents += [content[key] for key in _NESTING_FIELDS if key in content]
    check_size(field, count, MAX_PARTS, what=what)


def read_str(value: Any, key: str, field: str) -> str:
    """Return the text `key` of an object. Raises `InvalidRequest`."""
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InvalidRequest("expected str", field=f"{field}.{key}")
    return text


class _ConversationSize:
    """Counts the parts of contents, the tool calls and the values in their arguments."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.call_ids: set[str] = set()

    def check_result(self, call_id: Any, field: str) -> None:
        """Raise `InvalidRequest` for the result of a call that no message before it has."""
        if not isinstance(call_id, str):
            raise InvalidRequest(
                "required, but missing",
                hint="give the id of the call that the message answers",
                field=field,
            )
        if call_id not in self.call_ids:
            raise InvalidRequest(
                f"no earlier message has a call with the id {call_id[:64]!r}",
                hint="send the assistant's message with the call before its result",
                field=field,
            )

    def add(self, number: int, what: str, limit: int) -> None:
        """Raise `InvalidRequest` if all messages have too many of these."""
        self._counts[what] += number
        check_size("messages", self._counts[what], limit, what=what)


def normalise_messages(
    messages: list[dict[str, Any]], unknown_roles: str
) -> tuple[dict[str, Any], ...]:
    """Return the messages for chat templates: `content` is a string, a list of text parts, or None
    beside calls. Arguments of calls are JSON text. Fields without a value are left out.

    `unknown_roles`: "reject", or "warn" to drop messages with unknown roles. Raises
    `InvalidRequest` with the message and field.
    """
    if not messages:
        raise InvalidRequest("at least one is required", field="messages")
    check_size("messages", len(messages), MAX_MESSAGES)
    normalised, size = [], None
    for index, message in enumerate(messages):
        role = message["role"] if "role" in message else None  # noqa: SIM401 (calls cost more)
        if role in KNOWN_ROLES:
            content = message["content"] if "content" in message else None  # noqa: SIM401
            if len(message) == PLAIN_FIELDS and type(content) is str and role != "tool":
                normalised.append(message)
            else:
                size = size or _ConversationSize()
                normalised.append(_normalise_message(message, content, index, size))
        else:
            _handle_unknown_role(role, index, unknown_roles)
    if not normalised:
        raise InvalidRequest("none has a known role", field="messages")
    return tuple(normalised)


def _handle_unknown_role(role: Any, index: int, unknown_roles: str) -> None:
    field = f"messages[{index}].role"
    if role is None:
        raise InvalidRequest("required, but missing", field=field)
    if not isinstance(role, str):
        raise InvalidRequest("expected str", field=field)
    known = ", ".join(KNOWN_ROLES)
    if unknown_roles != "warn":
        raise InvalidRequest(f"unknown role {role[:64]!r}", hint=f"known: {known}", field=field)
    log.warning("message dropped: unknown role", extra={"fields": {"role": role[:64]}})


def _normalise_message(
    message: dict[str, Any], content: Any, index: int, size: _ConversationSize
) -> dict[str, Any]:
    """Convert a message with calls, reasoning or several parts. Raises `InvalidRequest`."""
    if message["role"] == "tool":
        size.check_result(message.get("tool_call_id"), f"messages[{index}].tool_call_id")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        message |= dict.fromkeys(_REASONING_FIELDS, reasoning)
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _check_tool_calls(calls, f"messages[{index}].tool_calls", size)
    field = f"messages[{index}].content"
    if content is None:
        content = message.get("refusal") or ("" if isinstance(reasoning, str) else None)
        if content is None and not calls:
            raise InvalidRequest("required, but missing", field=field)
    elif isinstance(content, list):
        size.add(len(content), "parts of all contents", MAX_PARTS)
        read = _result_part_text if message["role"] == "tool" else _part_text
        texts = [read(part, f"{field}[{number}]") for number, part in enumerate(content)]
        content = [{"type": "text", "text": text} for text in texts]
    elif not isinstance(content, str):
        raise InvalidRequest("expected str or a list of parts", field=field)
    message["content"] = content
    return message


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("expected an object", field=field)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest("expected str", field=f"{field}.type")
    key = _TEXT_PART_FIELDS.get(kind)
    if key is None:
        raise Unsupported(
            f"parts of type {kind[:64]!r} are not supported yet",
            hint="send parts of type text",
            field=f"{field}.type",
        )
    return read_str(part, key, field)


def _result_part_text(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_PART_FIELDS:
        return leave_out_of_result(kind)
    return _part_text(part, field)


def leave_out_of_result(kind: str) -> str:
    """Return the text that the model reads instead of an image or a file in a tool's result.

    The result is sent again with each later request, so that a refusal would end the conversation.
    """
    log.info("part of a tool's result left out", extra={"fields": {"type": kind[:64]}})
    return f"[{kind[:64]} left out: this model reads text only]"


def _check_tool_calls(calls: Any, field: str, size: _ConversationSize) -> list[dict[str, Any]]:
    """Return tool calls without null fields, their arguments as text. The text need not be JSON:
    an answer that was cut has such calls."""
    if not isinstance(calls, list):
        raise InvalidRequest("expected a list", field=field)
    size.add(len(calls), "tool calls of all", MAX_CALLS)
    checked = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                "expected an object with a name", field=f"{field}[{number}].function"
            )
        if isinstance(call.get("id"), str):
            size.call_ids.add(call["id"])
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        values = sum(map(arguments.count, "[{,"))
        size.add(values, "values in all tool arguments", MAX_ARGUMENT_VALUES)
        fields = {key: value for key, value in call.items() if value is not None}
        checked.append(fields | {"function": function | {"arguments": arguments}})
    return checked
