"""Chat templates: messages to prompt text, rendered as in `transformers`.

A template comes with the model, so it runs in jinja2's immutable sandbox and under bounds of time
and size (`template_sandbox`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import DynamoError, InvalidRequest
from dynamo.models.template_bounds import TemplateTooCostly
from dynamo.models.tool_prompt import describe_tools, has_tool_messages

if TYPE_CHECKING:
    from dynamo.models.template_sandbox import BoundedTemplate

log = logging.getLogger(__name__)

MAX_INDENT = 16
MAX_DATE_FORMAT_CHARS = 200

FALLBACK_LABELS = {
    "system": "System", "developer": "System", "user": "User", "assistant": "Assistant",
    "tool": "Tool",
}  # fmt: skip


class ChatTemplate:
    """A compiled template. Without a source the format is `System: …\\nUser: …\\nAssistant: `."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._template = _compile(source) if source else None
        self._has_tools = source is not None and "tools" in source
        self._described_tools = False
        self.was_too_costly = False
        template_globals = self._template.variables if self._template else {}
        self._globals = {**template_globals, "bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **args: Any,
    ) -> str:
        """Return the prompt. `args` are further variables for the template.

        Raises `InvalidRequest` with the template's message if the template refuses the messages,
        and if the rendering exceeds its bounds. `was_too_costly` is then True.
        """
        if not self._has_tools and (tools or has_tool_messages(messages)):
            messages, tools = self._describe_tools(messages, tools), ()
        if self._template is None:
            return _render_fallback(messages, add_generation_prompt)
        variables = {
            **self._globals,
            **args,
            "messages": messages,
            "tools": tools or None,
            "documents": args.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except TemplateTooCostly:
            self.was_too_costly = True
            raise
        except DynamoError:
            raise
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _describe_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        if not self._described_tools:
            self._described_tools = True
            log.info("the chat template has no tools; the system message describes them")
        return describe_tools(messages, tools)


def _compile(source: str) -> BoundedTemplate:
    from dynamo.models.template_sandbox import compile_template

    variables = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return compile_template(source, {"tojson": _to_json}, variables)


def _render_fallback(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    lines = [
        f"{FALLBACK_LABELS.get(message.get('role', ''), 'User')}: {message.get('content') or ''}"
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
