"""Calls of DeepSeek's models: V3 and V3.1 with JSON, V3.2 and later with DSML tags."""

from __future__ import annotations

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
    scan.begin_record()
    yield from scan.peek()
    yield from scan.take_literal("```")
    yield from scan.peek()
    yield from scan.take_literal(scan.mark(CALL_END))
    return True


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
