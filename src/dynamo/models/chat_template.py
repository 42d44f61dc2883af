"""Chat templates: messages to prompt text, rendered as in `transformers`.

A template comes with the model, so it runs in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import DynamoError, InvalidRequest, ModelUnavailable

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

SAFE_LOOP_ATTRIBUTES = frozenset(
    {"first", "last", "index", "index0", "length", "previtem", "nextitem"}
)

FALLBACK_LABELS = {
    "system": "System", "developer": "System", "user": "User", "assistant": "Assistant",
    "tool": "Tool",
}  # fmt: skip


class ChatTemplate:
    """A compiled template. Without a source the format is `System: …\\nUser: …\\nAssistant: `."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._template = _compile(source) if source else None
        template_globals = self._template.globals if self._template else {}
        self._globals = {**template_globals, "bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **args: Any,
    ) -> str:
        """Return the prompt. `args` are further variables for the template.

        Raises `InvalidRequest` with the template's message if the template refuses the messages.
        """
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
        template = self._template
        try:
            # Template.render would copy the environment's globals through a ChainMap on each call,
            # and collect their names for templates that import others.
            context = template.environment.context_class(
                template.environment, variables, None, template.blocks
            )
            return "".join(template.root_render_func(context))
        except DynamoError:
            raise
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _render_fallback(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    lines = [
        f"{FALLBACK_LABELS.get(message.get('role', ''), 'User')}: {message.get('content') or ''}"
        for message in messages
    ]
    if add_generation_prompt:
        lines.append("Assistant: ")
    return "\n".join(lines)


def _compile(source: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols

    environment = _sandbox_class()(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelUnavailable(
            f"the model's chat template is invalid: {error}",
            hint="correct chat_template in tokenizer_config.json, or chat_template.jinja",
        ) from error


def _sandbox_class() -> type[ImmutableSandboxedEnvironment]:
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox that skips the costly safety check for common attributes of `loop`."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is LoopContext and attribute in SAFE_LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
            return super().getattr(obj, attribute)

    return Sandbox


def _generation_tag() -> type[Any]:
    """Return an extension that renders the content of `{% generation %}…{% endgeneration %}`."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. The filter of jinja2 escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise InvalidRequest(str(message), param="messages")


def _strftime_now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)
