"""Structural schemas of custom kinds: defaults, pruning and validation in Kubernetes' words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dynamo.testing.kubernetes.failures import WrongField
from dynamo.testing.kubernetes.kinds import Object

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_COMBINATIONS = frozenset({"oneOf", "anyOf", "allOf", "not"})


def fill_defaults(schema: Object, value: Any) -> Any:
    """Return a value with the defaults of missing fields."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, part in schema.get("properties", {}).items():
            if filled.get(name) is None and "default" in part:
                filled[name] = part["default"]
            elif filled.get(name) is None and name in filled and not part.get("nullable"):
                del filled[name]
            if name in filled:
                filled[name] = fill_defaults(part, filled[name])
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            known = schema.get("properties", {})
            for name in filled.keys() - known.keys():
                filled[name] = fill_defaults(extra, filled[name])
        return filled
    if isinstance(value, list):
        return [fill_defaults(schema.get("items", {}), item) for item in value]
    return value


def prune(schema: Object, value: Any, path: str, dropped: list[str], *, root: bool = False) -> Any:
    """Return a value without the fields that its schema does not have. Their paths go to
    `dropped`."""
    if isinstance(value, list):
        items = schema.get("items", {})
        return [prune(items, v, f"{path}[{i}]", dropped) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    if schema.get("x-kubernetes-embedded-resource"):
        root = True
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or extra is True
    pruned = {}
    for name, part in value.items():
        below = f"{path}.{name}" if path else name
        if root and name in ("apiVersion", "kind", "metadata"):
            pruned[name] = part
        elif name in known:
            pruned[name] = prune(known[name], part, below, dropped)
        elif isinstance(extra, dict):
            pruned[name] = prune(extra, part, below, dropped)
        elif keeps:
            pruned[name] = part
        else:
            dropped.append(below)
    return pruned


def validate(schema: Object, value: Any, path: str) -> Iterator[WrongField]:
    """Yield what is wrong with a value."""
    if value is None and schema.get("nullable"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield _wrong_type(path, value, "integer,string")
        return
    expected = schema.get("type", "")
    if expected and not _has_type(expected, value):
        yield _wrong_type(path, value, expected)
        return
    choices = schema.get("enum")
    if choices is not None and value not in choices:
        listed = ", ".join(json.dumps(choice) for choice in choices)
        text = f"Unsupported value: {json.dumps(value)}: supported values: {listed}"
        yield WrongField(path, "FieldValueNotSupported", text)
    if isinstance(value, dict):
        yield from _validate_object(schema, value, path)
    elif isinstance(value, list):
        yield from _validate_list(schema, value, path)
    elif isinstance(value, str):
        yield from _validate_text(schema, value, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _validate_number(schema, value, path)
    if not _COMBINATIONS.isdisjoint(schema):
        yield from _validate_combinations(schema, value, path)


def _has_type(expected: str, value: Any) -> bool:
    if isinstance(value, bool):
        return expected == "boolean"
    return isinstance(value, _TYPES[expected]) or (
        expected == "integer" and isinstance(value, float) and value.is_integer()
    )


def _wrong_type(path: str, value: Any, expected: str) -> WrongField:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    actual = "null" if value is None else names.get(type(value), "number")
    where = path or "<nil>"
    text = f'Invalid value: "{actual}": {where} in body must be of type {expected}: "{actual}"'
    return WrongField(path, "FieldValueTypeInvalid", text)


def _validate_object(schema: Object, value: Object, path: str) -> Iterator[WrongField]:
    for name in schema.get("required", ()):
        if name not in value:
            below = f"{path}.{name}" if path else name
            yield WrongField(below, "FieldValueRequired", "Required value")
    known = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    for name, part in value.items():
        below = f"{path}.{name}" if path else name
        if name in known:
            yield from validate(known[name], part, below)
        elif isinstance(extra, dict):
            yield from validate(extra, part, below)
    most, least = schema.get("maxProperties", math.inf), schema.get("minProperties", 0)
    if len(value) > most:
        text = f"Too many: {len(value)}: must have at most {most} properties"
        yield WrongField(path, "FieldValueTooMany", text)
    if len(value) < least:
        yield _invalid(path, value, f"should have at least {least} properties")


def _validate_list(schema: Object, value: list[Any], path: str) -> Iterator[WrongField]:
    if len(value) > schema.get("maxItems", math.inf):
        text = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
        yield WrongField(path, "FieldValueTooMany", text)
    if len(value) < schema.get("minItems", 0):
        yield _invalid(path, len(value), f"should have at least {schema['minItems']} items")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    is_unique = schema.get("x-kubernetes-list-type") in ("map", "set") or schema.get("uniqueItems")
    seen = set[str]()
    for index, item in enumerate(value):
        yield from validate(schema.get("items", {}), item, f"{path}[{index}]")
        if not is_unique:
            continue
        own = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
        text = json.dumps(own, sort_keys=True)
        if text in seen:
            message = f"Duplicate value: {json.dumps(own, separators=(',', ':'))}"
            yield WrongField(f"{path}[{index}]", "FieldValueDuplicate", message)
        seen.add(text)


def _validate_text(schema: Object, value: str, path: str) -> Iterator[WrongField]:
    if len(value) > schema.get("maxLength", math.inf):
        text = f"Too long: may not be more than {schema['maxLength']} bytes"
        yield WrongField(path, "FieldValueTooLong", text)
    if len(value) < schema.get("minLength", 0):
        yield _invalid(path, value, f"should be at least {schema['minLength']} chars long")
    pattern = schema.get("pattern")
    if pattern and not re.search(pattern, value):
        yield _invalid(path, value, f"should match '{pattern}'")


def _validate_number(schema: Object, value: float, path: str) -> Iterator[WrongField]:
    if value < schema.get("minimum", -math.inf):
        yield _invalid(path, value, f"should be greater than or equal to {schema['minimum']}")
    if value > schema.get("maximum", math.inf):
        yield _invalid(path, value, f"should be less than or equal to {schema['maximum']}")


def _validate_combinations(schema: Object, value: Any, path: str) -> Iterator[WrongField]:
    parts = schema.get("oneOf", ())
    fitting = sum(not any(True for _ in validate(part, value, path)) for part in parts)
    if parts and fitting != 1:
        yield WrongField(
            path,
            "FieldValueInvalid",
            f'Invalid value: "": "{path}" must validate one and only one schema (oneOf). '
            f"Found {fitting or 'none'} valid{'' if fitting else ' alternatives'}",
        )
    options = schema.get("anyOf", ())
    if options and all(any(True for _ in validate(part, value, path)) for part in options):
        text = f'Invalid value: "": "{path}" must validate at least one schema (anyOf)'
        yield WrongField(path, "FieldValueInvalid", text)
    for part in schema.get("allOf", ()):
        yield from validate(part, value, path)
    if "not" in schema and not any(True for _ in validate(schema["not"], value, path)):
        text = f'Invalid value: "": "{path}" must not validate the schema (not)'
        yield WrongField(path, "FieldValueInvalid", text)


def _invalid(path: str, value: Any, text: str) -> WrongField:
    shown = json.dumps(value)
    return WrongField(path, "FieldValueInvalid", f"Invalid value: {shown}: {path} in body {text}")
