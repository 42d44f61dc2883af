"""Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,number:1}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import InvalidRequest
from dynamo.models.answers.call_grammar import CallGrammar, properties
from dynamo.models.answers.json_scanner import MAX_SCALAR_CHARS
from dynamo.models.answers.scanner import Scanner, WaitingBool, marker_set
from dynamo.models.answers.values import value_to_json
from dynamo.models.answers.writer import AnswerWriter, json_string

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
MAX_DEPTH = 64
_UNTYPED = frozenset[str]()


def read_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<|tool_call>`."""
    yield from scan.peek()
    yield from scan.take_literal("call:")
    name, brace = yield from scan.take_until("{")
    if not brace or name.strip() not in writer.tools:
        return False
    writer.open_call(name.strip())
    if not (yield from _read_container(scan, writer, "}", MAX_DEPTH)):
        return False
    writer.close_call()
    return (yield from scan.take_ends(scan.mark(CALL_END)))


def read_channel(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read the name of a channel behind `<|channel>`; its text is reasoning."""
    writer.begin_reasoning()
    if (yield from scan.take_literal("thought")):
        writer.leave_out()
    return True


def _read_container(scan: Scanner, writer: AnswerWriter, closer: str, depth: int) -> WaitingBool:
    """Read an object or a list behind its opening bracket, and write its JSON."""
    writer.arguments("{" if closer == "}" else "[")
    separator = ""
    while True:
        char = yield from scan.peek()
        if char == closer:
            scan.take(1)
            writer.arguments(closer)
            return True
        if separator:
            if char != ",":
                return False
            scan.take(1)
            yield from scan.peek()
        if closer == "}":
            if not (yield from _read_key(scan, writer, separator)):
                return False
        elif separator:
            writer.arguments(separator)
        if not (yield from _read_value(scan, writer, depth)):
            return False
        separator = ", "


def _read_key(scan: Scanner, writer: AnswerWriter, separator: str) -> WaitingBool:
    quote = scan.mark(QUOTE)
    if (yield from scan.take_literal(quote)):
        key, end = yield from scan.take_until(quote)
        yield from scan.peek()
        end = end and (yield from scan.take_literal(":"))
    else:
        key, end = yield from scan.take_until(":")
    if not end or not writer.is_clean(key):
        return False
    writer.arguments(f"{separator}{json_string(key.strip())}: ")
    return True


def _read_value(scan: Scanner, writer: AnswerWriter, depth: int) -> WaitingBool:
    quote = scan.mark(QUOTE)
    char = yield from scan.peek()
    if char in ("{", "[") and depth:
        scan.take(1)
        closer = "}" if char == "{" else "]"
        return (yield from _read_container(scan, writer, closer, depth - 1))
    if (yield from scan.take_literal(quote)):
        writer.arguments('"')
        closed = yield from scan.pass_until(marker_set(quote), writer.string_arguments)
        if closed:
            writer.arguments('"')
        return bool(closed)
    text, end = yield from scan.take_until(",", "}", "]", limit=MAX_SCALAR_CHARS)
    if not end:
        return False
    scan.put_back()
    text = text.strip()
    if not text or not writer.is_clean(text):
        return False
    writer.arguments(value_to_json(text, _UNTYPED, writer.is_clean))
    return True


def write_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of a call in Gemma's notation."""
    head = grammar.literal(f"{CALL}call:{name}")
    return f"{head} {_object(grammar, schema)} {grammar.literal(CALL_END)}"


def _value(grammar: CallGrammar, schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    options = schema.get("enum") if isinstance(schema, Mapping) else None
    quote = grammar.literal(QUOTE)
    if isinstance(options, list):
        texts = [
            f"{quote} {grammar.literal(option)} {quote}"
            if isinstance(option, str)
            else grammar.json({"const": option})
            for option in options
        ]
        return f"({' | '.join(texts)})"
    if kind == "string":
        return f"{quote} {grammar.text_until(QUOTE)}"
    if kind == "object":
        return _object(grammar, schema)
    if kind == "array":
        value = grammar.rule(_value(grammar, schema.get("items") or {"type": "string"}))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        rest = f'("," {value}){{{max(0, least - 1)},{most and most - 1}}}'
        return f'"[" {value} {rest} "]"' if least else f'"[" ({value} {rest})? "]"'
    if kind in ("integer", "number", "boolean", "null"):
        return grammar.json(schema)
    raise InvalidRequest(
        "calls in the format gemma4 can only be forced for parameters with a plain type",
        hint="give each parameter and item a `type` instead of $ref, anyOf or a list of types",
        field="tools",
    )


def _object(grammar: CallGrammar, schema: Mapping[str, Any]) -> str:
    """Return the expression of an object: required members, then optional ones, in order."""
    members = {
        key: f"{grammar.literal(f'{key}:')} {_value(grammar, value)}"
        for key, value in properties(schema).items()
    }
    required = [key for key in members if key in (schema.get("required") or ())]
    optional = [members[key] for key in members if key not in required]
    text = ' "," '.join(members[key] for key in required)
    if required:
        text = " ".join((text, *(f'("," {member})?' for member in optional)))
    else:
        for member in reversed(optional):
            text = f'({member} ("," {text})?)?' if text else f"({member})?"
    return f'"{{" {text} "}}"'
