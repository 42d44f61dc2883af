"""Calls of Kimi's models: K2 with section tokens, K3 with elements (`<|open|>`, `<|close|>`)."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from dynamo.models.answers.call_grammar import SMALL_NUMBER, CallGrammar, CallLayout
from dynamo.models.answers.json_scanner import stream_arguments
from dynamo.models.answers.scanner import Scanner, WaitingBool
from dynamo.models.answers.values import STRING, TaggedArguments, read_value
from dynamo.models.answers.writer import AnswerWriter

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def read_section(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read a section of calls (K2). Text between its calls is left out if there are calls."""
    mark, before = scan.mark, writer.calls_ended
    noise = ""
    while True:
        text, marker = yield from scan.take_until(mark(CALL), mark(SECTION_END))
        noise += text
        if marker != mark(CALL):
            return bool(writer.calls_ended > before or (marker and not noise.strip()))
        if not (yield from read_call(scan, writer)):
            return False


def read_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read `functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` (K2)."""
    head, marker = yield from scan.take_until(scan.mark(ARGUMENTS))
    call = _CALL_ID.fullmatch(head.strip())
    if not marker or call is None:
        return False
    name = head.strip() if head.strip() in writer.tools else call["name"]
    if name not in writer.tools:
        return False
    writer.open_call(name, head.strip())
    if not (yield from stream_arguments(scan, writer)):
        return False
    writer.close_call()
    return (yield from scan.take_ends(scan.mark(CALL_END)))


def read_element(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<|open|>` (K3): a call, or the tag of another element."""
    tag, marker = yield from scan.take_until(scan.mark(SEPARATOR))
    element = tag.split(maxsplit=1)[:1]
    if not marker:
        return False
    if element == ["think"]:
        writer.begin_reasoning()
    elif element == ["response"]:
        writer.end_reasoning()
    elif element == ["call"]:
        return (yield from _read_k3_call(scan, writer, _attributes(tag).get("tool", "")))
    return True


def read_close(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<|close|>` (K3)."""
    tag, marker = yield from scan.take_until(scan.mark(SEPARATOR))
    if tag.strip() == "think":
        writer.end_reasoning()
    return bool(marker)


def _read_k3_call(scan: Scanner, writer: AnswerWriter, name: str) -> WaitingBool:
    mark = scan.mark
    if name not in writer.tools:
        return False
    arguments = TaggedArguments(writer, name)
    argument, end = mark(f"{OPEN}argument "), mark(f"{CLOSE}call{SEPARATOR}")
    closers = {mark(f"{CLOSE}argument{SEPARATOR}"): (argument, end)}
    while True:
        yield from scan.peek()
        tag = yield from scan.take_literal(argument, end)
        if tag != argument:
            break
        text, _ = yield from scan.take_until(mark(SEPARATOR))
        attributes = _attributes(text)
        key = attributes.get("key", "")
        if not key or not writer.is_clean(key):
            return False
        kind = attributes.get("type")
        arguments.begin(key, None if kind is None else frozenset({kind}))
        if not (yield from read_value(scan, arguments, closers)):
            return False
    if tag:
        arguments.close()
    return bool(tag)


def _attributes(tag: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(tag)}


def call_layout(grammar: CallGrammar) -> CallLayout:
    """Return the layout of K2, or of K3 where the template or the vocabulary has its elements."""
    literal = grammar.literal
    if SECTION in grammar.template or grammar.has_token(SECTION):
        return CallLayout(_k2_call, literal(SECTION), "", literal(SECTION_END))
    before, after = f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}"
    return CallLayout(_k3_call, literal(before), "", literal(after))


def _k2_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    rest = grammar.json_call(ARGUMENTS, schema, CALL_END)
    return f"{grammar.literal(f'{CALL}functions.{name}:')} {SMALL_NUMBER} {rest}"


def _k3_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    def tags(key: str, types: frozenset[str]) -> tuple[str, str]:
        kind = "string" if types == STRING else min(types - STRING, default="object")
        head = f'{OPEN}argument key="{html.escape(key)}" type="{kind}"{SEPARATOR}'
        return head, f"{CLOSE}argument{SEPARATOR}"

    rest = grammar.tagged_call(f'"{SEPARATOR}', schema, tags, f"{CLOSE}call{SEPARATOR}")
    head = f'{OPEN}call tool="{name}" index="'
    return f"{grammar.literal(head)} {SMALL_NUMBER} {rest}"
