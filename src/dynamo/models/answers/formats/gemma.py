"""Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,number:1}`."""

from __future__ import annotations

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
    scan.begin_record()
    yield from scan.peek()
    yield from scan.take_literal(scan.mark(CALL_END))
    return True


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
