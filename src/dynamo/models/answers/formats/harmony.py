"""The messages of gpt-oss (Harmony): a header with channel and recipient, then a body."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from dynamo.models.answers.call_grammar import ANY_TEXT, CallGrammar, CallLayout
from dynamo.models.answers.json_scanner import stream_arguments
from dynamo.models.answers.scanner import MAX_REREAD_CHARS, Scanner, WaitingBool, marker_set
from dynamo.models.answers.writer import AnswerWriter

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN, CALL, RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.\-]+)")
_WORD = re.compile(r"\s*([A-Za-z]*)")
PREFIX = "functions."


def read_messages(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read messages to the end of the answer, which begins in a header."""
    mark = scan.mark
    message, channel = mark(MESSAGE), mark(CHANNEL)
    ends = tuple(map(mark, (END, CALL, RETURN, START)))
    first = True
    while True:
        parts = list[str]()
        while True:
            text, marker = yield from scan.take_until(message, channel, *ends, limit=sys.maxsize)
            parts += text, marker
            if marker != channel:
                break
        header = "".join(parts)
        if marker == message:
            yield from _read_body(scan, writer, header.removesuffix(message))
        elif not marker:
            header += scan.take_to(len(scan.text))
            _write_rest(scan, writer, header, first=first)
            return True
        first = False


def _write_rest(scan: Scanner, writer: AnswerWriter, header: str, *, first: bool) -> None:
    """Write a header without a body: an answer without any message, or a broken last one."""
    _, channel, text = header.rpartition(scan.mark(CHANNEL))
    if not channel and first:
        writer.text(header)
    elif channel and not scan.cut:
        writer.text(_WORD.sub("", text, count=1))


def _read_body(scan: Scanner, writer: AnswerWriter, header: str) -> WaitingBool:
    mark = scan.mark
    bodies = marker_set(*map(mark, (END, CALL, RETURN, START)))
    before, _, after = header.partition(mark(CHANNEL))
    channel = _WORD.match(after)
    recipient = _RECIPIENT.search(header)
    reasoning = channel is not None and channel[1] == "analysis"
    if recipient is not None:
        name = recipient[1].removeprefix(PREFIX)
        if name in writer.tools:
            scan.begin_record()
            writer.open_call(name)
            if (yield from stream_arguments(scan, writer)):
                writer.close_call()
                yield from scan.pass_until(bodies, _ignore)
                return True
            writer.abandon_call()
            if scan.ended and scan.cut:
                scan.drop_record()
            length = scan.unread()
            if length > MAX_REREAD_CHARS:
                writer.end_reasoning()
                writer.text(scan.take_unmarked(length, bodies))
        elif not recipient[1].startswith(PREFIX):
            yield from scan.pass_until(bodies, _ignore)
            return True
        reasoning = False
    if reasoning:
        writer.begin_reasoning()
    else:
        writer.end_reasoning()
    marker = yield from scan.pass_until(bodies, writer.text, outside=not reasoning)
    if reasoning:
        writer.end_reasoning()
    return bool(marker or before)


def _ignore(text: str) -> None:
    del text


def call_layout(grammar: CallGrammar) -> CallLayout:
    """Return the layout of one call, behind an analysis or not: a call ends the answer."""
    head = grammar.literal(f"{CHANNEL}analysis{MESSAGE}")
    tail = grammar.literal(f"{END}{START}assistant")
    return CallLayout(_call, f"({head} {grammar.rule(ANY_TEXT, name='T')} {tail})?", None)


def _call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    head = f"{CHANNEL}commentary to={PREFIX}{name} {CONSTRAIN}json{MESSAGE}"
    return grammar.json_call(head, schema, CALL)
