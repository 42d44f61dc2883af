"""Argument values that are not JSON: text between tags, typed by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from dynamo.models.answers.scanner import MAX_NAME_CHARS, Scanner, WaitingBool, marker_set
from dynamo.models.answers.writer import AnswerWriter, json_string

STRING = frozenset({"string"})
MAX_SCHEMA_ENTRIES = 256
MAX_OTHER_KEYS = 64
MAX_PYTHON_CHARS = 1 << 15
"""Longer texts are not read as Python, whose parser needs a microsecond for each character."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def value_types(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter; empty if unknown."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    value = properties.get(key) if isinstance(properties, dict) else None
    types, pending, entries = set[str](), [value], 0
    while pending and entries < MAX_SCHEMA_ENTRIES:
        entry = pending.pop()
        entries += 1
        if isinstance(entry, dict):
            names, parts = _read_entry(entry, schema)
            types.update(names)
            entries += len(names)
            pending += parts[:MAX_SCHEMA_ENTRIES]
    return frozenset(types)


def _read_entry(entry: dict[str, Any], root: Any) -> tuple[Sequence[str], Sequence[Any]]:
    """Return the types that an entry of a schema names, or else the entries that it consists of."""
    reference = entry.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return (), (target,)
    types = entry.get("type")
    if isinstance(types, str):
        return (types,), ()
    if isinstance(types, list):
        return [kind for kind in types[:MAX_SCHEMA_ENTRIES] if isinstance(kind, str)], ()
    allowed = entry.get("enum", [entry["const"]] if "const" in entry else None)
    if isinstance(allowed, list):
        values = allowed[:MAX_SCHEMA_ENTRIES]
        return [_KINDS.get(type(value), ("",))[0] for value in values], ()
    branches = [entry.get(key) for key in ("anyOf", "oneOf", "allOf")]
    return (), [part for some in branches if isinstance(some, list) for part in some]


def value_to_json(text: str, types: frozenset[str], is_key: Callable[[str], bool]) -> str:
    """Return the JSON of a value. A string stays a string even if it looks like a number, where the
    schema allows strings only. An object whose keys are not all `is_key` is a string, too."""
    if types == STRING:
        return json_string(text)
    stripped = text.strip()
    candidates = [_PYTHON_WORDS.get(stripped, stripped)]
    if types & {"object", "array"} and len(stripped) <= MAX_PYTHON_CHARS:
        candidates.append(python_to_json(stripped))
    for candidate in candidates:
        kinds = _json_kinds(candidate, is_key)
        if kinds and (not types or "string" not in types or types.intersection(kinds)):
            return candidate
    return json_string(text)


def _json_kinds(text: str, is_key: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the names of a JSON text's type, () for a text that is no JSON."""

    def check_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if not all(is_key(key) for key, _ in pairs):
            raise ValueError("a key contains a marker")
        return dict(pairs)

    unescaped = "\\" not in text
    try:
        value = json.loads(
            text,
            parse_constant=_refuse,
            parse_int=float if text.startswith(("{", "[")) else _parse_integer,
            object_pairs_hook=None if unescaped and is_key(text) else check_keys,
        )
    except (ValueError, RecursionError):
        return ()
    return _KINDS.get(type(value), ())


def _parse_integer(text: str) -> int:
    return int(text[:18])  # only the type counts; int() refuses very long texts


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def python_to_json(text: str | ast.expr) -> str:
    """Return the JSON of a Python literal, "" for other texts."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""


class TaggedArguments:
    """Writes the arguments of a call as JSON, of which the model writes keys and values as text.

    Strings are passed on piece by piece, other values when they are complete.
    """

    def __init__(self, writer: AnswerWriter, name: str) -> None:
        self._writer = writer
        self._schema = writer.tools[name]
        properties = self._schema.get("properties") if isinstance(self._schema, dict) else None
        names = properties if isinstance(properties, dict) else ()
        self._others = OrderedDict.fromkeys(key for key in names if len(key) <= MAX_NAME_CHARS)
        self._separator = "{"
        self._types: frozenset[str] = frozenset()
        self._parts: list[str] = []
        writer.open_call(name)

    @property
    def other_keys(self) -> Sequence[str]:
        """The parameters of the schema that have no value yet, at most `MAX_OTHER_KEYS`."""
        return list(islice(self._others, MAX_OTHER_KEYS))

    def begin(self, key: str, types: frozenset[str] | None = None) -> None:
        """Begin a value. `types`: those that the model wrote; else the schema's hold."""
        separator, self._separator = self._separator, ", "
        self._others.pop(key, None)
        self._types = value_types(self._schema, key) if types is None else types
        opening = '"' if self._types == STRING else ""
        self._writer.arguments(f"{separator}{json_string(key)}: {opening}")

    def value(self, text: str) -> None:
        """Take text of the value."""
        if self._types == STRING:
            self._writer.string_arguments(text)
        else:
            self._parts.append(self._writer.literal(text))

    def end_value(self) -> None:
        """The value is complete."""
        text, self._parts = "".join(self._parts), []
        string = self._types == STRING
        self._writer.arguments(
            '"' if string else value_to_json(text, self._types, self._writer.is_clean)
        )

    def close(self) -> None:
        """The call is complete."""
        self._writer.arguments("{}" if self._separator == "{" else "}")
        self._writer.close_call()


def read_value(
    scan: Scanner,
    arguments: TaggedArguments,
    closers: Mapping[str, Sequence[str]],
    *,
    unread: Sequence[str] = (),
    layout: str = "",
) -> WaitingBool:
    """Read the value that `arguments` has begun, up to a marker that closes it.

    `closers` maps markers to what may follow them; other text behind a marker makes the marker a
    part of the value. Nothing listed: any text may follow. Closers in `unread` are not read.
    `layout`: text before a closing marker that is not part of the value. Returns False if no marker
    closes the value.
    """
    markers = marker_set(*closers)
    while True:
        match = markers.search(scan.text, scan.position)
        end = markers.partial(scan.text, scan.position) if match is None else match.start()
        free = end - len(layout) if scan.text.endswith(layout, scan.position, end) else end
        if free > scan.position:
            arguments.value(scan.take_to(free))
        if match is None:
            if not (yield from scan.more()):
                return False
            continue
        before = scan.take_to(end)
        marker = scan.take(len(match[0]))
        place = scan.place
        follows = yield from _take_follower(scan, closers[marker])
        scan.return_to(place - (follows and marker in unread))
        if follows:
            arguments.end_value()
            return True
        arguments.value(before + marker)


def _take_follower(scan: Scanner, followers: Sequence[str]) -> WaitingBool:
    """Read white space and one of `followers`. Returns whether that or the end of the answer came.
    Without followers, anything may come."""
    if not followers or not (yield from scan.peek()):
        return True
    return bool((yield from scan.take_literal(*followers)))
