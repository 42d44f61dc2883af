"""JSON inside of answers: values that are passed on while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from dynamo.models.answers.scanner import Scanner, WaitingBool, WaitingText
from dynamo.models.answers.writer import AnswerWriter, json_string

MAX_DEPTH = 128
MAX_SCALAR_CHARS = 1 << 13
"""Longer numbers make a value invalid. A number is held back until it is complete."""
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR_VALUE = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\Z"
)

_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA, _STRING_BODY = range(7)


class JsonScanner:
    """Reads one JSON value strictly, except that strings may contain control characters.

    Special tokens in a string are its letters. In a key they make the value invalid. `done`: the
    value is complete; `failed`: it is invalid.
    """

    def __init__(self, writer: AnswerWriter) -> None:
        self.done = self.failed = False
        self._writer = writer
        self._state = _VALUE
        self._closers: list[str] = []
        self._in_key = False
        self._key: list[str] = []
        self._scalar: list[str] = []
        self._scalar_chars = 0

    def feed(self, text: str, position: int, *, ended: bool) -> tuple[int, str]:
        """Read on at a position. Returns the position that was reached, and the JSON text that is
        certain now."""
        output = list[str]()
        if self._scalar:
            position += self._read_scalar(text, position, output, ended=ended)
        while position < len(text) and not (self.done or self.failed):
            if self._state == _STRING_BODY:
                length = self._read_string(text, position, output)
            else:
                length = self._read_mark(text, position, output, ended=ended)
            if not length:
                break
            position += length
        return position, "".join(output)

    def _read_string(self, text: str, position: int, output: list[str]) -> int:
        target = self._key if self._in_key else output
        char = text[position]
        if match := _STRING.match(text, position):
            target.append(match[0])
            return len(match[0])
        if char == '"':
            target.append(char)
            self._end_string(output)
        elif char == "\\":
            self.failed = _ESCAPE_BEGUN.match(text, position) is None
            return 0
        elif char >= " " and self._in_key:
            self.failed = True
        else:
            target.append(json_string(self._writer.literal(char))[1:-1])
        return 1

    def _end_string(self, output: list[str]) -> None:
        if not self._in_key:
            self._end_value()
            return
        key = "".join(self._key)
        self._key, self._in_key, self._state = [], False, _COLON
        if self._writer.is_clean(key):
            output.append(key)
        else:
            self.failed = True

    def _read_mark(self, text: str, position: int, output: list[str], *, ended: bool) -> int:
        """Read white space, a mark or a scalar. Returns its length, 0 where it is incomplete."""
        space = _SPACE.match(text, position)
        if space is not None and space[0]:
            output.append(space[0])
            return len(space[0])
        # Each branch is a mark that is allowed in this state; others fail the scan.
        char, state = text[position], self._state
        if state in (_KEY, _KEY_OR_END) and char == '"':
            self._state, self._in_key = _STRING_BODY, True
            self._key.append(char)
            return 1
        if state in (_VALUE, _VALUE_OR_END) and char == '"':
            self._state = _STRING_BODY
        elif state in (_VALUE, _VALUE_OR_END) and char in "{[":
            self._open(char)
        elif state in (_VALUE, _VALUE_OR_END) and _SCALAR.match(text, position):
            return self._read_scalar(text, position, output, ended=ended)
        elif state == _COLON and char == ":":
            self._state = _VALUE
        elif state == _COMMA and char == ",":
            self._state = _KEY if self._closers[-1] == "}" else _VALUE
        elif state in (_COMMA, _KEY_OR_END, _VALUE_OR_END) and char == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        else:
            self.failed = True
            return 0
        output.append(char)
        return 1

    def _read_scalar(self, text: str, position: int, output: list[str], *, ended: bool) -> int:
        """Read the next part of a scalar, which is incomplete at the end of a text."""
        part = _SCALAR.match(text, position)
        length = 0 if part is None else part.end() - position
        self._scalar.append(text[position : position + length])
        self._scalar_chars += length
        long = self._scalar_chars > MAX_SCALAR_CHARS
        if position + length == len(text) and not (ended or long):
            return length
        scalar = "".join(self._scalar)
        self._scalar, self._scalar_chars = [], 0
        self.failed = long or _SCALAR_VALUE.match(scalar) is None
        if not self.failed:
            output.append(scalar)
            self._end_value()
        return length

    def _open(self, char: str) -> None:
        self._closers.append("}" if char == "{" else "]")
        self._state = _KEY_OR_END if char == "{" else _VALUE_OR_END
        self.failed = len(self._closers) > MAX_DEPTH

    def _end_value(self) -> None:
        self._state = _COMMA
        self.done = not self._closers


def copy_json(scan: Scanner, writer: AnswerWriter, sink: Callable[[str], None]) -> WaitingBool:
    """Read a JSON value and pass its text to `sink`. Returns False for an invalid one."""
    json_scanner = JsonScanner(writer)
    while True:
        end, output = json_scanner.feed(scan.text, scan.position, ended=scan.ended)
        scan.take_to(end)
        if output:
            sink(output)
        if json_scanner.done:
            return True
        if json_scanner.failed or not (yield from scan.more()):
            return False


def read_json(scan: Scanner, writer: AnswerWriter) -> WaitingText:
    """Read a JSON value. Returns its text, "" for an invalid one."""
    parts: list[str] = []
    complete = yield from copy_json(scan, writer, parts.append)
    return "".join(parts) if complete else ""


def stream_arguments(scan: Scanner, writer: AnswerWriter) -> WaitingBool:
    """Pass the arguments of an open call on: an object, its text in a string, or null."""
    char = yield from scan.peek()
    if char == "{":
        return (yield from copy_json(scan, writer, writer.arguments))
    text = yield from read_json(scan, writer)
    return write_whole_arguments(text, writer)


def write_whole_arguments(text: str, writer: AnswerWriter) -> bool:
    """Write complete arguments in the forms of `stream_arguments`. Returns False for others."""
    try:
        value = json.loads(text, parse_int=float)  # int() refuses long ones
        if isinstance(value, str):
            text = value
            value = json.loads(value, parse_constant=_refuse, parse_int=float)
    except (ValueError, RecursionError):
        return False
    if value is None:
        text, value = "{}", {}
    if not isinstance(value, dict):
        return False
    writer.arguments(text.strip())
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
"""The keys of an object that is a call and has no markers around it."""


def read_call_object(scan: Scanner, writer: AnswerWriter, *, strict: bool = False) -> WaitingBool:
    """Read `{"name": n, "arguments": {…}}` with keys in any order. Returns False for anything else.
    `strict`: other keys than `CALL_KEYS` are not allowed."""
    name, arguments, written, first = "", "", False, True
    if (yield from scan.peek()) != "{":
        return False
    scan.take(1)
    while True:
        char = yield from scan.peek()
        if char == "}":
            scan.take(1)
            break
        key = yield from _read_key(scan, writer, "" if first else ",")
        if not key or (strict and key not in CALL_KEYS):
            return False
        first = False
        # Arguments after the name are streamed; before it, they are kept until the end.
        if key in ("arguments", "parameters") and name and not written:
            written = True
            writer.open_call(name)
            if not (yield from stream_arguments(scan, writer)):
                return False
            continue
        text = yield from read_json(scan, writer)
        if not text:
            return False
        if key == "name":
            name = _string(text) or ""
            if name not in writer.tools:
                return False
        elif key in ("arguments", "parameters"):
            arguments = text
    return _end_call(writer, name, arguments, written=written)


def _read_key(scan: Scanner, writer: AnswerWriter, separator: str) -> WaitingText:
    """Read a key and its colon. Returns "" if there is none."""
    if separator and not (yield from scan.take_literal(separator)):
        return ""
    if (yield from scan.peek()) != '"':
        return ""
    key = _string((yield from read_json(scan, writer)))
    yield from scan.peek()
    colon = yield from scan.take_literal(":")
    return (key or "") if colon else ""


def _end_call(writer: AnswerWriter, name: str, arguments: str, *, written: bool) -> bool:
    if not name:
        return False
    if not written:
        writer.open_call(name)
        if not write_whole_arguments(arguments or "{}", writer):
            return False
    writer.close_call()
    return True


def _string(text: str) -> str | None:
    """Return the value of a JSON string, None for other values."""
    return json.loads(text, strict=False) if text.lstrip().startswith('"') else None
