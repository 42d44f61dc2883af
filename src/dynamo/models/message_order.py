"""The order of messages that a chat template reads, found by rendering probes.

Agents send system messages within a conversation, several messages of a role in a row, and several
calls at once. Some templates refuse such conversations or lose a message. `find_order` renders each
case when the template is loaded. `MessageOrder.arrange` changes conversations only where the
template needs it, and never the place of a text: a prefix that is cached stays one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dynamo.models.template_forms import (
    PROBE_TOOLS,
    Message,
    MessageForms,
    Render,
    call_message,
    content_text,
)

SYSTEM_ROLES = ("system", "developer")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class MessageOrder(msgspec.Struct, frozen=True):
    """The parts of conversations that a chat template does not read.

    `joins_leading`: more than one system message at the beginning. `moves_system`: system messages
    behind others, which become messages of the user. `alternates`: neighbours of one role, and a
    message of the user behind the result of a call. `splits_calls`: several calls in a message.
    `joins_thoughts`: reasoning beside content and calls.
    """

    joins_leading: bool = False
    moves_system: bool = False
    alternates: bool = False
    splits_calls: bool = False
    joins_thoughts: bool = False

    def arrange(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the conversation in an order that the template reads."""
        if self.joins_leading or self.moves_system:
            messages = self._arrange_system(messages)
        if self.alternates:
            messages = _join_neighbours(messages)
        if self.joins_thoughts:
            messages = [_join_thoughts(message) for message in messages]
        return list(_split_calls(messages)) if self.splits_calls else messages

    def _arrange_system(self, messages: Sequence[Message]) -> list[Message]:
        leading: list[Message] = []
        rest: list[Message] = []
        for message in messages:
            if message["role"] not in SYSTEM_ROLES or (rest and not self.moves_system):
                rest.append(message)
            elif rest:
                rest.append({**message, "role": "user"})
            else:
                leading.append(message)
        if self.joins_leading and leading:
            leading = [_join(leading)]
        return leading + rest


def _join(messages: Sequence[Message]) -> Message:
    """Return a message with the texts of all. Calls and thoughts are the last ones, the call that a
    result answers is the first one's."""
    first = messages[0]
    if first is messages[-1]:
        return first
    fields: dict[str, Any] = {}
    for message in messages:
        fields |= message
    if first["role"] == "tool":
        fields |= first
    texts = (content_text(message["content"]) for message in messages)
    return {**fields, "role": first["role"], "content": "\n\n".join(filter(None, texts))}


def _join_neighbours(messages: Sequence[Message]) -> list[Message]:
    groups: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        group = groups[-1] if groups and role in ("user", "assistant") else None
        if (
            group is None
            or group[-1].get("tool_calls")
            or (group[0]["role"] != role and (group[0]["role"], role) != ("tool", "user"))
        ):
            groups.append([message])
        else:
            group.append(message)
    return list(map(_join, groups))


def _join_thoughts(message: Message) -> Message:
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name)), None)
    if not thoughts or not message["content"] or not message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name not in _THOUGHTS}
    return _join([{**rest, "content": thoughts}, rest])


def _split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield a message for each call, its result behind it."""
    waiting: dict[Any, Message] = {}
    for message in messages:
        if message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            front = next(iter(waiting))
            answered = call_id if call_id in waiting else front
            yield {**waiting[front], "tool_calls": waiting[answered]["tool_calls"]}
            if answered != front:  # the text stays in front
                waiting[front] = {**waiting[answered], "tool_calls": waiting[front]["tool_calls"]}
            del waiting[answered]
            yield message
            continue
        yield from waiting.values()
        waiting = {}
        for number, call in enumerate(message.get("tool_calls") or ()):
            fields = {"role": message["role"], "content": None} if number else message
            key = number if call.get("id") in waiting else call.get("id")
            waiting[key] = {**fields, "tool_calls": [call]}
        if not waiting:
            yield message
    yield from waiting.values()


def find_order(render: Render, forms: MessageForms) -> MessageOrder:
    """Return what a template does not read of the order in which clients send messages."""

    def rendered(*messages: Message) -> str | None:
        tools = PROBE_TOOLS if messages[-1]["role"] == "tool" else ()
        return render(forms.adapt(messages), tools)

    def reads(*messages: Message) -> bool:
        text = rendered(*messages) or ""
        return all(needle in text for message in messages for needle in _needles(message))

    user, more, answer = _text("user", "us3r"), _text("user", "m0re"), _text("assistant", "answ3r")
    if not reads(user):
        return MessageOrder()
    systems = [
        (_text(role, "f1rst"), _text(role, "s3cond"))
        for role in SYSTEM_ROLES
        if role not in forms.renamed
    ]
    (call, result), (other, other_result) = _call(1), _call(2)
    both: Message = call | {"tool_calls": call["tool_calls"] + other["tool_calls"]}
    thinking: Message = call | dict.fromkeys(_THOUGHTS, "th1nking") | {"content": "c0ntent"}
    reads_calls = forms.reads_calls and reads(user, call, result)
    return MessageOrder(
        joins_leading=not all(reads(first, second, user) for first, second in systems),
        moves_system=forms.joins_system
        or not all(reads(first, user, second, answer, more) for first, second in systems),
        alternates=rendered(user, more, answer) is None,
        splits_calls=reads_calls and not reads(user, both, result, other_result),
        joins_thoughts=reads_calls and rendered(user, thinking, result) is None,
    )


def _text(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(number: int) -> tuple[dict[str, Any], Message]:
    """Return a message with a call, and its result."""
    call_id = f"call_pr0be{number}"
    result = {"tool_call_id": call_id, "name": "f", "content": f"resu1t{number}"}
    return call_message(json.dumps({"q": f"c4ll{number}"}), call_id), {"role": "tool", **result}


def _needles(message: Message) -> Iterator[str]:
    """Yield what a prompt with the message contains."""
    if message["content"]:
        yield message["content"]
    for call in message.get("tool_calls", ()):
        yield json.loads(call["function"]["arguments"])["q"]
