"""The items of a Responses request: their checked form, which is stored, and chat messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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


def read_input(value: str | Sequence[Any], response_key: str) -> list[Item]:
    """Return the input as items with ids. `response_key` makes the ids unique. Raises
    `InvalidRequest` and `Unsupported` with the item and field."""
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        head = {"id": f"msg_{response_key}_i0", "type": "message", "role": "user"}
        return [head | {"status": "completed", "content": content}]
    check_items(value)
    return [
        _read_item(item, f"input[{index}]", f"{response_key}_i{index}")
        for index, item in enumerate(value)
    ]


def check_items(items: Sequence[Any]) -> None:
    """Raise `InvalidRequest` for too many items or parts, which are converted without a pause."""
    check_size("input", len(items), MAX_MESSAGES)
    check_parts(list(items), "input", "parts of all items")


def _read_item(item: Any, field: str, key: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest("expected an object", field=field)
    kind = item.get("type") or ("message" if "role" in item else None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise Unsupported(
            f"items of type {str(kind)[:64]!r} are not supported",
            hint=f"supported: {', '.join(_READERS)}",
            field=f"{field}.type",
        )
    return read(item, field, key)


def _read_message(item: Item, field: str, key: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"unknown role {str(role)[:64]!r}",
            hint=f"known: {', '.join(ROLES)}",
            field=f"{field}.role",
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
    texts = {name: read_str(item, name, field) for name in ("call_id", "name", "arguments")}
    status = "incomplete" if item.get("status") == "incomplete" else "completed"
    head = {"id": _id(item, field, f"fc_{key}"), "type": "function_call", "status": status}
    return head | texts


def _read_custom_call(item: Item, field: str, key: str) -> Item:
    arguments = json.dumps({"input": read_str(item, "input", field)}, ensure_ascii=False)
    return _read_call(item | {"arguments": arguments}, field, key)


def _read_built_in_call(item: Item, field: str, key: str) -> Item:
    return item | {"id": _id(item, field, f"item_{key}")}


def _read_tools(item: Item, field: str, key: str) -> Item:
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("expected a list of objects", field=f"{field}.tools")
    return item | {"id": _id(item, field, f"at_{key}")}


def _read_call_output(item: Item, field: str, key: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _read_parts(output, f"{field}.output", "tool")
    return {
        "id": _id(item, field, f"fco_{key}"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": read_str(item, "call_id", field),
        "output": output,
    }


def _read_reasoning(item: Item, field: str, key: str) -> Item:
    parts = {
        name: [
            {"type": kind, "text": read_str(part, "text", f"{field}.{name}[{number}]")}
            for number, part in enumerate(_list(item.get(name) or [], f"{field}.{name}"))
        ]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }
    head = {"id": _id(item, field, f"rs_{key}"), "type": "reasoning", "status": "completed"}
    return head | parts


def _read_reference(item: Item, field: str, _key: str) -> Item:
    return {"type": "item_reference", "id": read_str(item, "id", field)}


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
        return {"type": "refusal", "refusal": read_str(part, "refusal", field)}
    if kind in _TEXT_PARTS:
        text = read_str(part, "text", field)
        if role == "assistant":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}
    if role == "tool" and isinstance(kind, str):
        return {"type": "input_text", "text": leave_out_of_result(kind)}
    raise Unsupported(
        f"parts of type {str(kind)[:64]!r} are not supported: models read text only",
        hint="send parts of type input_text",
        field=f"{field}.type",
    )


def _id(item: Item, field: str, default: str) -> str:
    return read_str(item, "id", field) if item.get("id") is not None else default


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest("expected str or a list of parts", field=field)
    return value


class ItemConversation(Conversation):
    """A conversation of items, with the tools that they add and their fields, by name."""

    tools: dict[str, tuple[Item, str]] = msgspec.field(default_factory=dict)

    def add_items(self, items: Sequence[Item], fields: Sequence[str]) -> None:
        """Append the messages of items. Neighbouring reasoning, text and calls of the assistant
        become one message. Reasoning that nothing follows is dropped. So are cut calls without an
        output, and outputs of calls that are left out."""
        answer: Item = {}
        answered = {item["call_id"] for item in items if item["type"] == "function_call_output"}
        left_out: set[str] = set()
        for item, field in zip(items, fields, strict=True):
            kind = item["type"]
            # Reasoning begins a message of the assistant, or extends one that has only reasoning.
            if kind == "reasoning":
                parts = item.get("content") or item.get("summary") or ()
                texts = [] if "role" in answer else [answer.get("reasoning_content", "")]
                texts.append("".join(part["text"] for part in parts))
                answer = {"reasoning_content": "\n".join(filter(None, texts))}
            elif kind == "function_call":
                if item.get("status") != "incomplete" or item["call_id"] in answered:
                    self._add_call(answer, item, field)
            elif kind == ADDITIONAL_TOOLS:
                for number, tool in enumerate(item["tools"]):
                    self.tools[str(tool.get("name"))] = tool, f"{field}.tools[{number}]"
            elif kind in BUILT_IN_CALLS or item.get("call_id") in left_out:
                left_out.add(str(item.get("call_id")))
                log.info("item left out", extra={"fields": {"type": kind}})
            elif kind == "message" and item["role"] == "assistant" and "role" not in answer:
                answer |= {"role": "assistant", "content": _content(item["content"])}
                self.add(answer, field)
            # Any other message ends that of the assistant.
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


def _message(item: Item) -> Item:
    if item["type"] == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else _content(output)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    return {"role": item["role"], "content": _content(item["content"])}


def _content(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of checked parts, as chat requests join theirs."""
    return "\n".join(part["refusal"] if "refusal" in part else part["text"] for part in parts)
