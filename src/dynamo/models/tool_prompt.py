"""Tools in the prompts of models whose chat template has none: as text in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.models.template_forms import content_text, decode_arguments

INSTRUCTION = "You may call the functions that are described between the tags <tools> and </tools>."
CALL_FORM = (
    ' To call one, answer with {"name": its name, "arguments": its arguments as an object} between '
    "the tags <tool_call> and </tool_call>."
)
Message = Mapping[str, Any]


def describe_tools(
    messages: Sequence[Message], tools: Sequence[Message], *, reads_calls: bool
) -> list[Message]:
    """Return messages whose system message describes the tools. Unless the template `reads_calls`,
    calls and their results become text between tags."""
    described = list(messages) if reads_calls else [_plain_message(message) for message in messages]
    if not tools:
        return described
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    block = f"{INSTRUCTION}{'' if reads_calls else CALL_FORM}\n<tools>\n{lines}\n</tools>"
    if described and described[0].get("role") in ("system", "developer"):
        first = described[0]
        content = f"{content_text(first['content'])}\n\n{block}".strip()
        return [{**first, "content": content}, *described[1:]]
    return [{"role": "system", "content": block}, *described]


def has_tool_messages(messages: Sequence[Message]) -> bool:
    """Return whether messages contain calls or results of tools."""
    for message in messages:  # noqa: SIM110 - a generator would cost a call a message
        if "tool_calls" in message or "tool_call_id" in message:
            return True
    return False


def _plain_message(message: Message) -> Message:
    if message.get("role") == "tool":
        content = content_text(message["content"])
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = content_text(message["content"])
    parts = [content] if content else []
    for call in calls:
        function = call["function"]
        arguments = decode_arguments(function.get("arguments"))
        body = {"name": function["name"], "arguments": arguments}
        parts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(parts)}
