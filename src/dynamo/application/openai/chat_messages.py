"""Conversion of clients' chat messages to messages for chat templates."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from dynamo.application.openai.generation_body import check_size
from dynamo.core.errors import InvalidRequest, Unsupported

log = logging.getLogger(__name__)

MAX_MESSAGES = 1 << 14
MAX_PARTS = 1 << 14
MAX_ARGUMENT_VALUES = 1 << 17
"""Limits of a conversation, which is converted without a pause."""

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PART_FIELDS = {"refusal": "refusal"} | dict.fromkeys(
    ("text", "input_text", "output_text"), "text"
)


class _ConversationSize:
    """The parts of contents and the values in tool arguments of all messages so far."""

    def __init__(self) -> None:
        self._parts = self._values = 0

    def add_parts(self, number: int) -> None:
        """Raise `InvalidRequest` if there are too many parts."""
        self._parts += number
        check_size("messages: parts of all contents", self._parts, MAX_PARTS, param="messages")

    def add_arguments(self, text: str) -> None:
        """Raise `InvalidRequest` if JSON arguments have too many values."""
        self._values += sum(map(text.count, "[{,"))
        field = "messages: values in all tool arguments"
        check_size(field, self._values, MAX_ARGUMENT_VALUES, param="messages")


def normalise_messages(
    messages: list[dict[str, Any]], unknown_roles: str
) -> tuple[dict[str, Any], ...]:
    """Return the messages with `content` as one string.

    `unknown_roles`: "reject", or "warn" to drop messages with unknown roles. Raises
    `InvalidRequest` with the message and field.
    """
    if not messages:
        raise InvalidRequest("messages: at least one is required", param="messages")
    check_size("messages", len(messages), MAX_MESSAGES)
    normalised, size = [], None
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in KNOWN_ROLES:
            content = message.get("content")
            if type(content) is str and "tool_calls" not in message:
                normalised.append(message)
            else:
                size = size or _ConversationSize()
                normalised.append(_flatten_content(message, content, index, size))
        else:
            _handle_unknown_role(role, index, unknown_roles)
    if not normalised:
        raise InvalidRequest("messages: none has a known role", param="messages")
    return tuple(normalised)


def _handle_unknown_role(role: Any, index: int, unknown_roles: str) -> None:
    field = f"messages[{index}].role"
    if role is None:
        raise InvalidRequest(f"{field}: required, but missing", param=field)
    if not isinstance(role, str):
        raise InvalidRequest(f"{field}: expected str", param=field)
    known = ", ".join(KNOWN_ROLES)
    if unknown_roles != "warn":
        raise InvalidRequest(
            f"{field}: unknown role {role[:64]!r}", hint=f"known: {known}", param=field
        )
    log.warning("message dropped: unknown role", extra={"fields": {"role": role[:64]}})


def _flatten_content(
    message: dict[str, Any], content: Any, index: int, size: _ConversationSize
) -> dict[str, Any]:
    field = f"messages[{index}].content"
    calls = message.get("tool_calls")
    if calls:
        tool_calls = _decode_tool_calls(calls, f"messages[{index}].tool_calls", size)
        message = message | {"tool_calls": tool_calls}
    elif "tool_calls" in message:  # null or empty: templates check whether the key exists
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(content, str):
        return message
    if content is None:
        if not calls and message.get("refusal") is None:
            raise InvalidRequest(f"{field}: required, but missing", param=field)
        return message | {"content": message.get("refusal") or ""}
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}: expected str or a list of parts", param=field)
    size.add_parts(len(content))
    texts = [_part_text(part, f"{field}[{number}]") for number, part in enumerate(content)]
    return message | {"content": "\n".join(texts)}


def _part_text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{field}: expected an object", param=field)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{field}.type: expected str", param=f"{field}.type")
    key = _TEXT_PART_FIELDS.get(kind)
    if key is None:
        raise Unsupported(
            f"{field}: parts of type {kind[:64]!r} are not supported yet",
            hint="send parts of type text",
            param=f"{field}.type",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.{key}: expected str", param=f"{field}.{key}")
    return text


def _decode_tool_calls(calls: Any, field: str, size: _ConversationSize) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, which templates serialise again."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{field}: expected a list", param=field)
    decoded = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"{field}[{number}].function: expected an object with a name",
                param=f"{field}[{number}].function",
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            size.add_arguments(arguments)
            function = function | {"arguments": _decode_arguments(arguments)}
        decoded.append(call | {"function": function})
    return decoded


def _decode_arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text
