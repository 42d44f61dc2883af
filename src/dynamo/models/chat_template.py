"""Chat templates: messages to prompt text, rendered as in `transformers`.

A template comes with the model, so it runs in jinja2's immutable sandbox and under bounds of time
and size (`template_sandbox`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import DynamoError, InvalidRequest
from dynamo.models.message_order import MessageOrder, find_order
from dynamo.models.template_bounds import TemplateTooCostly
from dynamo.models.template_forms import (
    PROBE_TOOLS,
    Message,
    MessageForms,
    RawText,
    Render,
    content_text,
    find_forms,
)
from dynamo.models.tool_prompt import describe_tools, has_tool_messages

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.models.template_sandbox import BoundedTemplate

log = logging.getLogger(__name__)

MAX_INDENT = 16
MAX_DATE_FORMAT_CHARS = 200

END_MARK = "END_OF_THE_LAST_MESSAGE "
"""Stands at the end of a message that the answer continues, while it is rendered."""
FALLBACK_LABELS = {
    "system": "System", "developer": "System", "user": "User", "assistant": "Assistant",
    "tool": "Tool",
}  # fmt: skip


class ChatTemplate:
    """The templates of a model: `source`, and `tool_source` for requests with tools.

    Without a source the format is `System: …\\nUser: …\\nAssistant: `. `special_tokens` are
    variables of the templates.
    """

    def __init__(
        self, source: str | None, tool_source: str | None = None, **special_tokens: str
    ) -> None:
        self._plain = _Source(source, special_tokens)
        self._with_tools = self._plain
        if tool_source:
            self._with_tools = _Source(tool_source, special_tokens, PROBE_TOOLS)
        self._described_tools = False
        self.was_too_costly = False

    @classmethod
    def of(cls, card: ModelCard) -> ChatTemplate:
        """Compile the templates of a model. Raises `ModelUnavailable`."""
        tokens = {"bos_token": card.bos_token, "eos_token": card.eos_token} | card.special_tokens
        return cls(card.chat_template, card.tool_template, **tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **args: Any,
    ) -> str:
        """Return the prompt. `args` are further variables for the template.

        Each message has a role and a content: a string, a list of text parts, or None. Raises
        `InvalidRequest` with the template's message if the template refuses the messages, and if
        the rendering exceeds its bounds. `was_too_costly` is then True.
        """
        source = self._with_tools if tools else self._plain
        if not source.has_tools and (tools or has_tool_messages(messages)):
            self._log_description()
            messages = describe_tools(messages, tools, reads_calls=source.forms.reads_calls)
            tools = ()
        if source.template is None:
            return _render_fallback(messages, add_generation_prompt)
        if source.order is not None:
            messages = source.order.arrange(messages)
        changed_roles = source.changed_roles
        for message in messages:
            if (
                type(message["content"]) is not str
                or "tool_calls" in message
                or message["role"] in changed_roles
            ):
                messages = source.forms.adapt(messages)
                break
        variables = {
            **source.variables,
            **args,
            "messages": messages,
            "tools": tools or None,
            "documents": args.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return source.template.render(variables)
        except TemplateTooCostly:
            self.was_too_costly = True
            raise
        except DynamoError:
            raise
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **args: Any,
    ) -> str:
        """Return the prompt that ends with the text of the last message. Raises as `render`.

        As in `transformers`, white space at the end stays only where the template keeps it.
        """
        *earlier, last = messages
        if last["content"] is None:
            raise InvalidRequest("the last one has no text to continue", field="messages")
        marked = {**last, "content": content_text(last["content"]) + END_MARK}
        text = self.render([*earlier, marked], tools, add_generation_prompt=False, **args)
        end = text.rfind(END_MARK.strip())
        if end < 0:
            raise InvalidRequest(
                "the model's chat template leaves out the text of the last one",
                hint="end with a user message",
                field="messages",
            )
        return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()

    def _log_description(self) -> None:
        if not self._described_tools:
            self._described_tools = True
            log.info("the chat template has no tools; the system message describes them")


class _Source:
    """A compiled template and the forms of messages that it reads. `probe_tools`: probes have them
    where no others are given, for a template that is used with tools only."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        probe_tools: Sequence[Message] = (),
    ) -> None:
        self._probe_tools = probe_tools
        self.template = _compile(source) if source else None
        self.has_tools = source is not None and "tools" in source
        self.variables = dict(self.template.variables) if self.template else {}
        self.variables |= special_tokens
        self.forms = MessageForms()
        self.order: MessageOrder | None = None
        if self.template is not None:
            self._probe(partial(self._render_probe, self.template))
        self.changed_roles = self.forms.changed_roles

    def _probe(self, render: Render) -> None:
        """Find the forms and the order that the template reads. Both stay the usual ones for a
        template that is too costly."""
        try:
            self.forms = find_forms(render)
            order = find_order(render, self.forms)
        except TemplateTooCostly as error:
            log.warning("the chat template is too costly", extra={"fields": {"error": str(error)}})
        else:
            self.order = order if order != MessageOrder() else None

    def _render_probe(
        self, template: BoundedTemplate, messages: Sequence[Message], tools: Sequence[Message]
    ) -> str | None:
        tools = tools or self._probe_tools
        request = {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return template.render({**self.variables, **request, "add_generation_prompt": False})
        except TemplateTooCostly:
            raise
        except Exception:  # noqa: BLE001 (a template raises whatever it likes)
            return None


def _compile(source: str) -> BoundedTemplate:
    from dynamo.models.template_sandbox import compile_template

    variables = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return compile_template(source, {"tojson": _to_json}, variables)


def _render_fallback(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    lines = [
        f"{FALLBACK_LABELS.get(message['role'], 'User')}: {content_text(message['content'])}"
        for message in messages
    ]
    if add_generation_prompt:
        lines.append("Assistant: ")
    return "\n".join(lines)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. The filter of jinja2 escapes for HTML."""
    if type(value) is RawText:
        return str(value)
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_INDENT:
        raise ValueError(f"tojson(indent={width}): at most {MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise InvalidRequest(str(message), param="messages")


def _strftime_now(date_format: str) -> str:
    if len(date_format) > MAX_DATE_FORMAT_CHARS:
        raise ValueError(f"strftime_now takes at most {MAX_DATE_FORMAT_CHARS} characters")
    return datetime.now().astimezone().strftime(date_format)
