"""Errors for structured outputs that cannot be enforced: they name the keyword and its place in the
schema."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import InvalidRequest

_UNKNOWN_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')
_UNKNOWN_VALUES = (
    (re.compile(r"Unknown format: (.+)"), "format"),
    (re.compile(r"Invalid type: (.+)"), "type"),
    (re.compile(r"Pointer '(.+)' does not exist"), "$ref"),
    (re.compile(r"Resource '(.+)' is not present"), "$ref"),
    (re.compile(r"regex parse error:\n    (.+)\n"), "pattern"),
)
_PLACE = re.compile(r"\bat line (\d+), '|(?:^|at )(\d+)\((\d+)\): ")
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentSchemas"}
)
_VALUES = frozenset({"const", "enum", "default", "examples"})


def schema_refusal(schema: str, reason: str, field: str) -> InvalidRequest:
    """Return the error for a schema that llguidance refuses for `reason`. `field` is the place of
    the schema in the request."""
    keyword, value = "", ""
    if match := _UNKNOWN_KEYS.match(reason):
        keyword = match[1]
    for pattern, name in _UNKNOWN_VALUES:
        if match := pattern.search(reason):
            keyword, value = name, match[1].split(" ")[0] if name == "$ref" else match[1]
    document = msgspec.json.decode(schema)
    text = reason.partition("\n")[0] if keyword != "pattern" else reason.rpartition("error: ")[2]
    if not keyword:
        return InvalidRequest(f"the schema cannot be enforced: {text}", field=field)
    pointer = find_keyword(document, keyword, value)
    return InvalidRequest(
        f"the schema cannot be enforced: {keyword!r} at {pointer or '/'}: {text.strip()}",
        hint="leave the keyword out, or check the answer yourself",
        field=field,
    )


def grammar_refusal(kind: str, reason: str, field: str) -> InvalidRequest:
    """Return the error for a grammar or a regular expression with a mistake."""
    match = _PLACE.search(reason)
    lines = [line.strip() for line in reason.strip().splitlines()]
    text = lines[-1].removeprefix("error: ") if kind == "regex" and len(lines) > 1 else lines[0]
    if kind == "regex":
        text = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
        return InvalidRequest(f"the regex cannot be enforced: {text}", field=field)
    place = f"line {match[1] or match[2]}" if match else "its rules"
    if match and match[3]:
        place += f", column {match[3]}"
        text = text[match.end() :]
    return InvalidRequest(f"the {kind} has an error at {place}: {text}", field=field)


def find_keyword(schema: Any, keyword: str, value: str = "") -> str:
    """Return the JSON pointer of the first use of a keyword, of any value or of one that contains
    `value`; "" where there is none."""
    for pointer, node in subschemas(schema, ""):
        if keyword in node and (not value or value in str(node[keyword])):
            return f"{pointer}/{keyword}"
    return ""


def find_endless(schema: Any) -> str:
    """Return the JSON pointer of a reference whose every instance contains another one without end;
    "" where there is none."""
    nodes = list(subschemas(schema, ""))
    targets = {node["$ref"] for _, node in nodes if isinstance(node.get("$ref"), str)}
    ending: set[str] = set()
    while more := {name for name in targets - ending if _ends(_resolve(schema, name), ending)}:
        ending |= more
    if _ends(schema, ending):
        return ""
    for pointer, node in nodes:
        if isinstance(node.get("$ref"), str) and not _ends(node, ending):
            return f"{pointer}/$ref"
    return "/"


def _ends(node: Any, ending: Container[str]) -> bool:
    """Return whether a schema has an instance of finite size, or is not affected by recursion.
    The references in `ending` have one."""
    if not isinstance(node, Mapping):
        return True
    target = node.get("$ref")
    if isinstance(target, str) and target not in ending:
        return False
    # Every instance contains these: all of allOf, required properties, the first item.
    parts = list(node.get("allOf") or ()) if isinstance(node.get("allOf"), list) else []
    properties, required = node.get("properties"), node.get("required")
    if isinstance(properties, Mapping) and isinstance(required, list):
        parts += [properties.get(name) for name in required if isinstance(name, str)]
    if isinstance(node.get("minItems"), int) and node["minItems"] > 0:
        first = node.get("prefixItems")
        parts.append(first[0] if isinstance(first, list) and first else node.get("items"))
    if not all(_ends(part, ending) for part in parts):
        return False
    # An instance contains one of these.
    choices = (node[name] for name in ("anyOf", "oneOf") if isinstance(node.get(name), list))
    return all(any(_ends(option, ending) for option in options) for options in choices if options)


def _resolve(root: Any, reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def subschemas(node: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema inside of one, with its pointer."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from subschemas(item, f"{pointer}/{number}")
    if not isinstance(node, dict):
        return
    yield pointer, node
    for key, value in node.items():
        inner = f"{pointer}/{_escape(key)}"
        if key in _NAMED and isinstance(value, Mapping):
            for name, schema in value.items():
                yield from subschemas(schema, f"{inner}/{_escape(name)}")
        elif key not in _VALUES:
            yield from subschemas(value, inner)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
