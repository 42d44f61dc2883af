"""Calls between `<tool_call>` tags: JSON (Hermes), function tags (Qwen), keys and values (GLM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.models.answers.call_grammar import CallGrammar
from dynamo.models.answers.json_scanner import read_call_object
from dynamo.models.answers.scanner import Scanner, WaitingBool
from dynamo.models.answers.values import TaggedArguments, read_value
from dynamo.models.answers.writer import AnswerWriter

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def read_tagged_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<tool_call>`, in any of the three forms."""
    if (yield from scan.peek()) == "{":
        if not (yield from read_call_object(scan, writer)):
            return False
        return (yield from scan.take_ends(scan.mark(CALL_END)))
    if (yield from scan.take_literal(scan.mark(FUNCTION))):
        return (yield from read_function(scan, writer))
    return (yield from _read_keyed_call(scan, writer))


def read_function(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<function=`."""
    mark = scan.mark
    name, _ = yield from scan.take_until(">")
    if name not in writer.tools:
        return False
    arguments = TaggedArguments(writer, name)
    parameter, ends = mark(PARAMETER), (mark(FUNCTION_END), mark(CALL_END))
    while True:
        yield from scan.peek()
        tag = yield from scan.take_literal(parameter, *ends)
        if tag != parameter:
            break
        key, _ = yield from scan.take_until(">")
        if not key or not writer.is_clean(key):
            return False
        yield from scan.take_literal("\n")
        arguments.begin(key)
        others = [f"{key}>" for key in arguments.other_keys]
        closers: dict[str, Sequence[str]] = {mark(PARAMETER_END): (parameter, *ends)}
        if others:
            closers[parameter] = others  # the model has left the end of this parameter out
        if not (yield from read_value(scan, arguments, closers, unread=(parameter,), layout="\n")):
            return False
    if not tag and (scan.cut or (yield from scan.peek())):
        return False
    arguments.close()  # the answer may end without the last tag
    return True


def _read_keyed_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    mark = scan.mark
    key_tag, end = mark(KEY), mark(CALL_END)
    name, tag = yield from scan.take_until(key_tag, end, mark(CALL))
    if name.strip() not in writer.tools or tag == mark(CALL):
        return False
    arguments = TaggedArguments(writer, name.strip())
    closers = {mark(VALUE_END): (key_tag, end), end: (mark(CALL),)}
    while tag == key_tag:
        key, _ = yield from scan.take_until(mark(KEY_END))
        yield from scan.peek()
        opened = yield from scan.take_literal(mark(VALUE))
        if not key.strip() or not writer.is_clean(key) or not opened:
            return False
        arguments.begin(key.strip())
        if not (yield from read_value(scan, arguments, closers, unread=(end,))):
            return False
        yield from scan.peek()
        tag = yield from scan.take_literal(key_tag, end)
    if tag:
        arguments.close()
    return bool(tag)


def hermes_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of `<tool_call>` with JSON."""
    head = f'{CALL}\n{{"name": "{name}", "arguments": '
    return grammar.json_call(head, schema, f"}}\n{CALL_END}")


def function_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of `<function=` tags (Qwen)."""

    def tags(key: str, types: frozenset[str]) -> tuple[str, str]:
        del types
        return f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"

    head = f"{CALL}\n{FUNCTION}{name}>\n"
    return grammar.tagged_call(head, schema, tags, f"{FUNCTION_END}\n{CALL_END}")


def keyed_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of keys and values (GLM)."""

    def tags(key: str, types: frozenset[str]) -> tuple[str, str]:
        del types
        return f"{KEY}{key}{KEY_END}\n{VALUE}", f"{VALUE_END}\n"

    return grammar.tagged_call(f"{CALL}{name}\n", schema, tags, CALL_END)
