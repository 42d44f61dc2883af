"""The form of messages that a chat template reads, found by rendering probes.

Some templates read contents as a string, others as a list of parts. Some read arguments of calls as
an object, others as JSON text. Some refuse a role. `find_forms` renders each case once, when
the template is loaded. `MessageForms.adapt` gives messages that form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str | None]
"""Renders messages and tools. Returns None when the template refuses them."""

_NEEDLE, _SECOND = "pr0be", "t3xt"
_DUMPED_PARTS = re.compile(r"""['"]text['"]: ?['"]""")
_DUMPED_ARGUMENTS = re.compile(r"""\\"q\\"|'q'""")
_CALL_ID = "call_pr0be1"
_SHORT_ID_CHARS = 9
"""The length of the ids of calls in Mistral's templates, which refuse others."""


class RawText(str):
    """Text that stands in the place of a JSON value. The filter `tojson` writes it as it is."""

    __slots__ = ()


class MessageForms(msgspec.Struct, frozen=True):
    """The forms of contents, calls and roles that a chat template reads.

    `wrapped`: the roles whose content must be a list of parts. `parts`: those whose content may be
    one. `renamed`: roles that the template does not know, by the role to send in their place.
    `joins_system`: a system message becomes the beginning of the next user message.
    `text_arguments`: arguments of calls are JSON text. `raw_arguments`: arguments that are no JSON
    object can be given as text. `no_content`: what stands for the content of a message without one.
    `short_call_ids`: ids of calls have nine letters and digits. `reads_calls`: calls are rendered.
    """

    wrapped: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    renamed: dict[str, str] = {}
    joins_system: bool = False
    text_arguments: bool = False
    raw_arguments: bool = True
    no_content: Literal["null", "empty", "absent"] = "null"
    short_call_ids: bool = False
    reads_calls: bool = False

    @property
    def changed_roles(self) -> frozenset[str]:
        """The roles whose messages change though their content is a string."""
        return self.wrapped | self.renamed.keys() | ({"system"} if self.joins_system else set())

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in this form. Their arguments of calls are JSON text or objects."""
        adapted: list[Message] = []
        system = ""
        for message in messages:
            role = self.renamed.get(message["role"], message["role"])
            changed = {**message, "role": role}
            if role == "system" and self.joins_system:
                system += f"{content_text(message['content'])}\n\n"
                continue
            if system and role == "user":
                changed["content"] = system + content_text(message["content"])
                system = ""
            self._set_content(changed)
            if message.get("tool_calls"):
                changed["tool_calls"] = [self._adapt_call(call) for call in message["tool_calls"]]
            if self.short_call_ids and "tool_call_id" in message:
                changed["tool_call_id"] = _short_id(message["tool_call_id"])
            adapted.append(changed)
        if system:
            adapted.append({"role": "user", "content": system.removesuffix("\n\n")})
        return adapted

    def _set_content(self, message: dict[str, Any]) -> None:
        content, role = message["content"], message["role"]
        if content is None:
            if self.no_content == "absent":
                del message["content"]
            elif self.no_content == "empty":
                message["content"] = ""
        elif isinstance(content, str):
            if role in self.wrapped:
                message["content"] = [{"type": "text", "text": content}]
        elif role not in self.parts:
            message["content"] = content_text(content)

    def _adapt_call(self, call: Message) -> Message:
        function = call["function"]
        arguments = function.get("arguments")
        if self.text_arguments:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {}, ensure_ascii=False)
        else:
            arguments = decode_arguments(arguments)
            if not isinstance(arguments, dict):
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                arguments = RawText(text) if self.raw_arguments else {"arguments": text}
        changed = {**call, "function": {**function, "arguments": arguments}}
        if self.short_call_ids and isinstance(call.get("id"), str):
            changed["id"] = _short_id(call["id"])
        return changed


_DEFAULT = MessageForms()


def content_text(content: Any) -> str:
    """Return the text of a content: of a string, of a list of text parts, of None."""
    if isinstance(content, list | tuple):
        return "\n".join(part["text"] for part in content)
    return content or ""


def decode_arguments(arguments: Any) -> Any:
    """Return the object of a call's arguments, and text that is no JSON object as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def find_forms(render: Render) -> MessageForms:
    """Return the forms that a template reads."""
    contents = {role: _read_contents(render, role) for role in ("user", "system", "developer")}
    calls = _find_call_forms(render, wrapped=contents["user"] == (False, True))
    contents["assistant"] = _read_contents(render, "assistant")
    contents["tool"] = _read_contents(render, "tool", calls)
    known = {role for role, reads in contents.items() if any(reads)}
    renamed = {}
    if "developer" not in known and "user" in known:
        renamed = {"developer": "system"}
    return msgspec.structs.replace(
        calls,
        wrapped=frozenset(role for role in known if contents[role] == (False, True)),
        parts=frozenset(role for role in known if contents[role][1]),
        renamed=renamed,
        joins_system="system" not in known and "user" in known,
    )


def _read_contents(render: Render, role: str, calls: MessageForms = _DEFAULT) -> tuple[bool, bool]:
    """Return whether a role's content is read from a string, and from a list of parts."""
    parts = [{"type": "text", "text": text} for text in (_NEEDLE, _SECOND)]
    text = _render_role(render, role, _NEEDLE, calls)
    listed = _render_role(render, role, parts, calls)
    return _NEEDLE in text, all(
        (_NEEDLE in listed, _SECOND in listed, not _DUMPED_PARTS.search(listed))
    )


def _render_role(render: Render, role: str, content: Any, calls: MessageForms) -> str:
    """Return the rendering of a conversation whose message of `role` has `content`."""
    probe: Message = {"role": role, "content": content}
    question = {"role": "user", "content": "q"}
    if role == "user":
        return render([probe], ()) or ""
    if role in {"system", "developer"}:
        return render([probe, question], ()) or ""
    if role == "assistant":
        return render([question, probe, question], ()) or ""
    [call] = calls.adapt([call_message('{"q": "v"}')])
    call_id = call["tool_calls"][0]["id"]
    return (
        render([question, call, {**probe, "tool_call_id": call_id, "name": "f"}], PROBE_TOOLS) or ""
    )


_PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "d"}}}
PROBE_TOOLS: tuple[Message, ...] = (
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": _PARAMETERS}},
)


def call_message(arguments: str, call_id: str = _CALL_ID) -> dict[str, Any]:
    """Return a message with a call of the tool in `PROBE_TOOLS`."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _find_call_forms(render: Render, *, wrapped: bool) -> MessageForms:
    """Return the forms of messages with calls: the first that renders the arguments plainly, else
    the first that is rendered at all."""
    users = frozenset({"user"} if wrapped else ())
    candidates = [
        MessageForms(wrapped=users, text_arguments=text, no_content=content, short_call_ids=short)
        for short in (False, True)
        for text in (False, True)
        for content in ("null", "empty", "absent")
    ]
    rendered = None
    for forms in candidates:
        text = _render_call(render, forms, f'{{"q": "{_NEEDLE}"}}')
        if _NEEDLE in text and not _DUMPED_ARGUMENTS.search(text):
            cut = _render_call(render, forms, f'{{"q": "{_NEEDLE}')
            return msgspec.structs.replace(forms, raw_arguments=_NEEDLE in cut, reads_calls=True)
        if text and rendered is None:
            rendered = forms
    return rendered or candidates[0]


def _render_call(render: Render, forms: MessageForms, arguments: str) -> str:
    """Return the rendering of a call and its result; "" if something stands there as "None"."""
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": "r"}
    messages = [{"role": "user", "content": "q"}, call_message(arguments), result]
    text = render(forms.adapt(messages), PROBE_TOOLS) or ""
    return "" if "None" in text else text


def _short_id(call_id: Any) -> str:
    """Return nine letters and digits for the id of a call."""
    plain = re.sub("[^a-zA-Z0-9]", "", str(call_id))
    return plain[-_SHORT_ID_CHARS:].rjust(_SHORT_ID_CHARS, "0")
