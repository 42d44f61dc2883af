"""Calls of Mistral's models behind `[TOOL_CALLS]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.models.answers.call_grammar import CallGrammar, CallLayout
from dynamo.models.answers.json_scanner import read_call_object, stream_arguments
from dynamo.models.answers.scanner import Scanner, WaitingBool
from dynamo.models.answers.writer import AnswerWriter

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_calls(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read a list of call objects (v3), or `name[CALL_ID]id[ARGS]{…}` (v11 and later)."""
    char = yield from scan.peek()
    if char == "{":
        return (yield from read_call_object(scan, writer))
    if char != "[" or scan.text.startswith("[ARGS]", scan.position):
        return (yield from _read_named_call(scan, writer))
    while char in ("[", ","):
        scan.take(1)
        if not (yield from read_call_object(scan, writer)):
            return False
        scan.begin_record()
        char = yield from scan.peek()
    if char == "]":
        scan.take(1)
    return True


def _read_named_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    mark = scan.mark
    name, marker = yield from scan.take_until(mark(ARGUMENTS), mark(CALL_ID), "{")
    call_id = ""
    if marker == mark(CALL_ID):
        call_id, marker = yield from scan.take_until(mark(ARGUMENTS))
    if not marker or name.strip() not in writer.tools:
        return False
    if marker == "{":
        scan.put_back()
    writer.open_call(name.strip(), call_id.strip())
    if not (yield from stream_arguments(scan, writer)):
        return False
    writer.close_call()
    return True


def call_layout(grammar: CallGrammar) -> CallLayout:
    """Return the layout of v11 and later where the vocabulary has its marker, else of v3."""
    if grammar.has_token(ARGUMENTS):
        return CallLayout(_named_call)
    literal = grammar.literal
    return CallLayout(_listed_call, literal(f"{CALLS} ["), literal(", "), literal("]"))


def _named_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    return grammar.json_call(f"{CALLS}{name}{ARGUMENTS}", schema, "")


def _listed_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    return grammar.json_call(f'{{"name": "{name}", "arguments": ', schema, "}")
