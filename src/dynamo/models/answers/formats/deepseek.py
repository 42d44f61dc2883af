"""Calls of DeepSeek's models: V3 and V3.1 with JSON, V3.2 and later with DSML tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.models.answers.call_grammar import CallGrammar, CallLayout
from dynamo.models.answers.json_scanner import stream_arguments
from dynamo.models.answers.scanner import Scanner, WaitingBool
from dynamo.models.answers.values import STRING, TaggedArguments, read_value
from dynamo.models.answers.writer import AnswerWriter

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DSML = "｜DSML｜"
SPACES = ("", " ")
INVOKES = tuple(f'<{DSML}{space}invoke name="' for space in SPACES)
INVOKE_ENDS = tuple(f"</{DSML}{space}invoke>" for space in SPACES)
PARAMETERS = tuple(f'<{DSML}{space}parameter name="' for space in SPACES)
PARAMETER_ENDS = tuple(f"</{DSML}{space}parameter>" for space in SPACES)
SECTIONS = tuple(
    f"<{slash}{DSML}{name}>"
    for slash in ("", "/")
    for name in ("function_calls", "tool_calls", " calls", "calls")
)
_JSON_TYPES = frozenset({"json"})


def read_json_call(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read `name<sep>{…}` (V3.1), or `function<sep>name` and fenced JSON (V3)."""
    name, separator = yield from scan.take_until(scan.mark(SEPARATOR))
    if not separator:
        return False
    if (yield from scan.peek()) != "{":
        name, _ = yield from scan.take_until("\n")
        yield from scan.peek()
        yield from scan.take_literal("```json")
    if name.strip() not in writer.tools:
        return False
    writer.open_call(name.strip())
    if not (yield from stream_arguments(scan, writer)):
        return False
    writer.close_call()
    return (yield from scan.take_ends("```", scan.mark(CALL_END)))


def read_invoke(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Read what follows `<｜DSML｜invoke name="`."""
    name, _ = yield from scan.take_until('"')
    tag = yield from scan.take_literal("/>", ">")
    if name not in writer.tools or not tag:
        return False
    arguments = TaggedArguments(writer, name)
    parameters = tuple(map(scan.mark, PARAMETERS))
    ends = tuple(map(scan.mark, INVOKE_ENDS))
    closers = {scan.mark(end): (*parameters, *ends) for end in PARAMETER_ENDS}
    while tag != "/>":
        yield from scan.peek()
        tag = yield from scan.take_literal(*parameters, *ends)
        if tag not in parameters:
            break
        key, _ = yield from scan.take_until('"')
        kind = yield from scan.take_literal(' string="true">', ' string="false">', ">")
        if not kind or not key or not writer.is_clean(key):
            return False
        types = {"t": STRING, "f": _JSON_TYPES}.get(kind[9:10])
        arguments.begin(key, types)
        if not (yield from read_value(scan, arguments, closers)):
            return False
    if tag:
        arguments.close()
    return bool(tag)


def call_layout(grammar: CallGrammar) -> CallLayout:
    """Return the layout that the chat template shows: JSON between tokens, or DSML tags."""
    literal, template = grammar.literal, grammar.template
    if DSML not in template and (SEPARATOR in template or grammar.has_token(SEPARATOR)):
        before, after = literal(CALLS_BEGIN), literal(CALLS_END)
        return CallLayout(_json_call, before, literal("\n") + "?", after)
    section = next((name for name in SECTIONS if name in template), SECTIONS[0])
    after = literal(section.replace("<", "</", 1))
    return CallLayout(_invoke, literal(f"{section}\n"), "", after)


def _json_call(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    if "```json" in grammar.template:
        head = f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n"
        return grammar.json_call(head, schema, f"\n```{CALL_END}")
    return grammar.json_call(f"{CALL_BEGIN}{name}{SEPARATOR}", schema, CALL_END)


def _invoke(grammar: CallGrammar, name: str, schema: Mapping[str, Any]) -> str:
    kind = int(INVOKES[1] in grammar.template)

    def tags(key: str, types: frozenset[str]) -> tuple[str, str]:
        string = "true" if types == STRING else "false"
        return f'{PARAMETERS[kind]}{key}" string="{string}">', f"{PARAMETER_ENDS[kind]}\n"

    head = f'{INVOKES[kind]}{name}">\n'
    return grammar.tagged_call(head, schema, tags, f"{INVOKE_ENDS[kind]}\n")
