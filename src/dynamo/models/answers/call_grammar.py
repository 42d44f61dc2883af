"""Writes the grammar of tool calls, in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.models.answers.alphabet import MarkerAlphabet
from dynamo.models.answers.values import STRING, value_types
from dynamo.models.grammar.schema_rewriting import rewrite_schema

MAX_CALLS = 16
"""So many calls a forced answer may have."""
ANY_TEXT = "/(?s:.*)/"
SMALL_NUMBER = "/[0-9]{1,2}/"
JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
}
_DEFINITIONS = ("$defs", "definitions")


WriteCall = Callable[["CallGrammar", str, Mapping[str, Any]], str]
"""Returns the expression of one call, from a tool's name and the schema of its parameters."""


class CallLayout(msgspec.Struct, frozen=True):
    """How a family writes calls: the expression of one call, and expressions around all of them.
    `between` None: an answer has one call at most."""

    write: WriteCall
    before: str = ""
    between: str | None = ""
    after: str = ""


WriteCalls = Callable[["CallGrammar"], CallLayout]
"""Chooses the layout of a model's calls."""


def joined_by(between: str, write: WriteCall) -> WriteCalls:
    """Return the layout of calls with a text between them and nothing around."""
    return lambda grammar: CallLayout(write, between=grammar.literal(between))


class CallGrammar:
    """Collects the rules of one grammar. Markers that are tokens of the vocabulary are written as
    these tokens, since readers look for nothing else. `template`: the model's chat template."""

    def __init__(self, alphabet: MarkerAlphabet, template: str) -> None:
        self.template = template
        self._alphabet = alphabet
        self._rules: list[str] = []

    def has_token(self, text: str) -> bool:
        """Return whether a marker is one token."""
        return [type(part) for part in self._alphabet.split(text)] == [int]

    def literal(self, text: str) -> str:
        """Return the expression of a fixed text."""
        parts = self._alphabet.split(text)
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def rule(self, body: str, options: str = "", name: str = "r") -> str:
        """Add a rule and return its name. Terminals have names of capital letters."""
        name = f"{name}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def json(self, schema: Any, root: Mapping[str, Any] | None = None) -> str:
        """Return the expression of JSON by a schema, which is a part of `root`."""
        document = dict(schema) if isinstance(schema, Mapping) else {}
        for key in _DEFINITIONS if root else ():
            if root and key in root:
                document[key] = root[key]
        text = json.dumps({**document, "x-guidance": JSON_STYLE})
        return self.rule(f"%json {rewrite_schema(text)}")

    def text_until(self, end: str) -> str:
        """Return the expression of any text and of the marker behind it."""
        parts = self._alphabet.split(end)
        if all(isinstance(part, str) for part in parts):
            return self.rule(ANY_TEXT, f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        if isinstance(parts[0], str):
            return f"{self.rule(f'/[^{_pattern(parts[0][0])}]*/', name='T')} {self.literal(end)}"
        return f"{self.text_without([end.strip()])} {self.literal(end)}"

    def text_without(self, markers: Sequence[str]) -> str:
        """Return the expression of text in which no marker is written in letters."""
        escaped = "|".join(map(_pattern, markers))
        return self.rule(f"{ANY_TEXT} & ~/(?s:.*)({escaped})(?s:.*)/", name="T")

    def json_call(self, before: str, schema: Mapping[str, Any], after: str) -> str:
        """Return the expression of a call whose arguments are JSON."""
        return f"{self.literal(before)} {self.json(schema)} {self.literal(after)}"

    def tagged_call(
        self,
        head: str,
        schema: Mapping[str, Any],
        tags: Callable[[str, frozenset[str]], tuple[str, str]],
        tail: str,
    ) -> str:
        """Return the expression of a call whose arguments stand between tags. `tags` returns those
        before and behind the value of a key with these types."""
        parts = [self.literal(head)]
        required = schema.get("required")
        names = required if isinstance(required, list) else ()
        for key, value in properties(schema).items():
            types = value_types(schema, key)
            before, after = tags(key, types)
            options = value.get("enum") if isinstance(value, Mapping) else None
            if types != STRING:
                text = f"{self.json(value, schema)} {self.literal(after)}"
            elif isinstance(options, list):
                texts = " | ".join(self.literal(str(option)) for option in options)
                text = f"({texts}) {self.literal(after)}"
            else:
                text = self.text_until(after)
            text = f"{self.literal(before)} {text}"
            parts.append(text if key in names else f"({text})?")
        return " ".join((*parts, self.literal(tail)))

    def write(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join((f"start: {start}", *self._rules, ""))


def _pattern(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of the parameters that a tool can have."""
    declared = schema.get("properties")
    values = declared if isinstance(declared, Mapping) else {}
    return {key: value for key, value in values.items() if value is not False}


def calls_expression(
    grammar: CallGrammar, layout: CallLayout, tools: Mapping[str, Any], *, one_call: bool
) -> str:
    """Return the expression of the calls of an answer. `tools`: schemas of parameters by name."""
    calls = [
        grammar.rule(layout.write(grammar, name, closed(schema))) for name, schema in tools.items()
    ]
    call = grammar.rule(" | ".join(calls))
    if not (one_call or layout.between is None):
        call = f"{call} ({layout.between} {call}){{0,{MAX_CALLS - 1}}}"
    return " ".join(filter(None, (layout.before, call, layout.after)))


def closed(schema: Any) -> Mapping[str, Any]:
    """Return the schema of arguments without parameters that it does not name."""
    document = dict(schema) if isinstance(schema, Mapping) else {}
    if not document:
        document = {"properties": {}}
    open_keys = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
    if open_keys.isdisjoint(document):
        document["additionalProperties"] = False
    return {"type": "object", **document}
