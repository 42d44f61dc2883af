"""The items of a Responses request: their checked form, which is stored, and chat messages."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.application.openai.chat_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    leave_out_of_result,
)
from dynamo.application.openai.generation_body import check_size
from dynamo.core.errors import DynamoError, InvalidRequest, Unsupported

log = logging.getLogger(__name__)

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
PREVIOUS = "previous_response_id"
ADDITIONAL_TOOLS = "additional_tools"
BUILT_IN_CALLS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "computer_call", "computer_call_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output"),
)
"""Items of tools that are no functions, which are stored and shown to no model."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_PART_FIELDS = ("content", "output", "summary", "tools")
_MESSAGE_FIELD = re.compile(r"messages\[(\d+)\](\.tool_call_id)?")
_RENAMED_FIELDS = (
    (re.compile(r"response_format\.json_schema\b|response_format\b"), "text.format"),
    (re.compile(r"max_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)


def read_input(value: str | Sequence[Any], response_key: str) -> list[Item]:
    """Return the input as items with ids. `response_key` makes the ids unique. Raises
    `InvalidRequest` and `Unsupported` with the item and field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    check_items(value)
    return [
        _read_item(item, f"input[{index}]", f"{response_key}_i{index}")
        for index, item in enumerate(value)
    ]


def check_items(items: Sequence[Any]) -> None:
    """Raise `InvalidRequest` for too many items or parts, which are converted without a pause."""
    check_size("input", len(items), MAX_MESSAGES)
    check_size("input: parts of all items", sum(_part_counts(items)), MAX_PARTS, param="input")


def _part_counts(items: Iterable[Any]) -> Iterator[int]:
    for item in items:
        if isinstance(item, dict):
            parts = (item.get(field) for field in _PART_FIELDS)
            yield sum(len(value) for value in parts if isinstance(value, list))


def _read_item(item: Any, field: str, key: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{field}: expected an object", param=field)
    kind = item.get("type") or ("message" if "role" in item else None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise Unsupported(
            f"{field}.type: items of type {str(kind)[:64]!r} are not supported",
            hint=f"supported: {', '.join(_READERS)}",
            param=f"{field}.type",
        )
    return read(item, field, key)


def _read_message(item: Item, field: str, key: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{field}.role: unknown role {str(role)[:64]!r}",
            hint=f"known: {', '.join(ROLES)}",
            param=f"{field}.role",
        )
    message = {
        "id": _id(item, field, f"msg_{key}"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": _read_parts(item.get("content"), f"{field}.content", role),
    }
    return message | ({"phase": item["phase"]} if item.get("phase") is not None else {})


def _read_call(item: Item, field: str, key: str) -> Item:
    texts = {name: _text(item, name, field) for name in ("call_id", "name", "arguments")}
    status = "incomplete" if item.get("status") == "incomplete" else "completed"
    head = {"id": _id(item, field, f"fc_{key}"), "type": "function_call", "status": status}
    return head | texts


def _read_custom_call(item: Item, field: str, key: str) -> Item:
    arguments = json.dumps({"input": _text(item, "input", field)}, ensure_ascii=False)
    return _read_call(item | {"arguments": arguments}, field, key)


def _read_built_in_call(item: Item, field: str, key: str) -> Item:
    return item | {"id": _id(item, field, f"item_{key}")}


def _read_tools(item: Item, field: str, key: str) -> Item:
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{field}.tools: expected a list of objects", param=f"{field}.tools")
    return item | {"id": _id(item, field, f"at_{key}")}


def _read_call_output(item: Item, field: str, key: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _read_parts(output, f"{field}.output", "tool")
    return {
        "id": _id(item, field, f"fco_{key}"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": _text(item, "call_id", field),
        "output": output,
    }


def _read_reasoning(item: Item, field: str, key: str) -> Item:
    parts = {
        name: [
            {"type": kind, "text": _text(part, "text", f"{field}.{name}[{number}]")}
            for number, part in enumerate(_list(item.get(name) or [], f"{field}.{name}"))
        ]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }
    head = {"id": _id(item, field, f"rs_{key}"), "type": "reasoning", "status": "completed"}
    return head | parts


def _read_reference(item: Item, field: str, _key: str) -> Item:
    return {"type": "item_reference", "id": _text(item, "id", field)}


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_call_output,
    "reasoning": _read_reasoning,
    "item_reference": _read_reference,
    ADDITIONAL_TOOLS: _read_tools,
} | dict.fromkeys(BUILT_IN_CALLS, _read_built_in_call)


def _read_parts(content: Any, field: str, role: str) -> list[Item]:
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    parts = _list(content, field)
    return [_read_part(part, f"{field}[{number}]", role) for number, part in enumerate(parts)]


def _read_part(part: Any, field: str, role: str) -> Item:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text(part, "refusal", field)}
    if kind in _TEXT_PARTS:
        text = _text(part, "text", field)
        if role == "assistant":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}
    if role == "tool" and isinstance(kind, str):
        return {"type": "input_text", "text": leave_out_of_result(kind)}
    raise Unsupported(
        f"{field}.type: parts of type {str(kind)[:64]!r} are not supported: models read text only",
        hint="send parts of type input_text",
        param=f"{field}.type",
    )


def _id(item: Item, field: str, default: str) -> str:
    return _text(item, "id", field) if item.get("id") is not None else default


def _text(item: Any, name: str, field: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name}: expected str", param=f"{field}.{name}")
    return value


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: expected str or a list of parts", param=field)
    return value


class ChatMessages(msgspec.Struct):
    """Chat messages, the field of the request that each comes from, and the tools that items add,
    by name."""

    messages: list[Item] = []
    fields: list[str] = []
    tools: dict[str, Item] = {}

    def add(self, message: Item, field: str) -> None:
        """Append a message."""
        self.messages.append(message)
        self.fields.append(field)

    def add_items(self, items: Sequence[Item], fields: Iterator[str]) -> None:
        """Append the messages of items. Neighbouring reasoning, text and calls of the assistant
        become one message. Reasoning that nothing follows is dropped. So are cut calls without an
        output, and outputs of calls that are left out."""
        answer: Item = {}
        answered = {item["call_id"] for item in items if item["type"] == "function_call_output"}
        left_out: set[str] = set()
        for item, field in zip(items, fields, strict=False):
            kind = item["type"]
            if kind == "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                answer = {"reasoning_content": "".join(part["text"] for part in parts)}
            elif kind == "function_call":
                if item.get("status") != "incomplete" or item["call_id"] in answered:
                    self._add_call(answer, item, field)
            elif kind == ADDITIONAL_TOOLS:
                self.tools |= {str(tool.get("name")): tool for tool in item["tools"]}
            elif kind in BUILT_IN_CALLS or item.get("call_id") in left_out:
                left_out.add(str(item.get("call_id")))
                log.info("item left out", extra={"fields": {"type": kind}})
            elif kind == "message" and item["role"] == "assistant" and "role" not in answer:
                answer |= {"role": "assistant", "content": _content(item["content"])}
                self.add(answer, field)
            else:
                self.add(_message(item), field)
                answer = self.messages[-1] if item.get("role") == "assistant" else {}

    def _add_call(self, answer: Item, item: Item, field: str) -> None:
        if "role" not in answer:
            answer |= {"role": "assistant", "content": None}
            self.add(answer, field)
        calls = answer.setdefault("tool_calls", [])
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def rename_fields(self, error: DynamoError) -> None:
        """Name the fields of a Responses request in an error about the chat request."""
        error.message = self._rename(error.message)
        error.param = self._rename(error.param) if error.param else error.param

    def _rename(self, text: str) -> str:
        text = _MESSAGE_FIELD.sub(self._field, text)
        for pattern, name in _RENAMED_FIELDS:
            text = pattern.sub(name, text)
        return text

    def _field(self, match: re.Match[str]) -> str:
        number = int(match[1])
        if number >= len(self.fields):
            return match[0]
        return self.fields[number] + (".call_id" if match[2] else "")


def _message(item: Item) -> Item:
    if item["type"] == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else _content(output)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    return {"role": item["role"], "content": _content(item["content"])}


def _content(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of checked parts, as chat requests join theirs."""
    return "\n".join(part["refusal"] if "refusal" in part else part["text"] for part in parts)
