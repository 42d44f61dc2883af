"""CEL rules of custom kinds (`x-kubernetes-validations`), by the test extra's library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.testing.kubernetes.failures import WrongField
from dynamo.testing.kubernetes.kinds import Object

_REASONS = {
    "FieldValueForbidden": "Forbidden",
    "FieldValueRequired": "Required value",
    "FieldValueDuplicate": "Duplicate value",
}
_ROOT_FIELDS = {"apiVersion", "kind", "metadata"}
_CHAIN = re.compile(r"\b(?:self|oldSelf)((?:\.[a-zA-Z_]\w*\b(?!\())+)")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "lowerAscii": str.lower,
    "upperAscii": str.upper,
    "trim": str.strip,
    "split": str.split,
    "join": lambda parts, by="": by.join(parts),
    "replace": str.replace,
    "find": lambda text, pattern: (re.search(pattern, text) or [""])[0],
}


@cache
def _compile(rule: str) -> Any:
    try:
        import cel
    except ImportError:
        raise ConfigError(
            "the rules of a kind cannot be checked without a library for CEL",
            hint="pip install common-expression-language",
        ) from None
    return cel.compile(rule)


def check_definition(schema: Object, path: str, *, root: bool = False) -> Iterator[WrongField]:
    """Yield the rules of a schema that are no CEL, or name fields that the schema does not have."""
    for index, rule in enumerate(schema.get("x-kubernetes-validations") or ()):
        where = f"{path}.x-kubernetes-validations[{index}].rule"
        try:
            _compile(rule["rule"])
        except ValueError as error:
            text = f"Invalid value: {json.dumps(rule['rule'])}: compilation failed: {error}"
            yield WrongField(where, "FieldValueInvalid", text)
            continue
        for chain in _CHAIN.finditer(rule["rule"]):
            if unknown := _unknown_field(schema, chain[1].strip(".").split("."), root=root):
                text = f"Invalid value: {json.dumps(rule['rule'])}: compilation failed: "
                yield WrongField(where, "FieldValueInvalid", f"{text}undefined field '{unknown}'")
    for name, part in schema.get("properties", {}).items():
        yield from check_definition(part, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from check_definition(schema[name], f"{path}.{name}")


def _unknown_field(schema: Object, names: list[str], *, root: bool) -> str:
    for name in names:
        if root and name in _ROOT_FIELDS:
            return ""
        root = False
        properties = schema.get("properties")
        if properties is None:
            return "" if "additionalProperties" in schema else name
        if name not in properties:
            return name
        schema = properties[name]
    return ""


def check(schema: Object, value: Any, old: Any, path: str) -> Iterator[WrongField]:
    """Yield the rules that a value breaks. `old` is the value before, None for a new one."""
    for rule in schema.get("x-kubernetes-validations") or ():
        if (cause := _broken(rule, value, old, path)) is not None:
            yield cause
    if isinstance(value, dict):
        extra = schema.get("additionalProperties")
        for name, part in value.items():
            below = schema.get("properties", {}).get(name, extra)
            if isinstance(below, dict):
                before = old.get(name) if isinstance(old, dict) else None
                yield from check(below, part, before, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for index, item in enumerate(value):
            before = _same_item(old, item, keys)
            yield from check(schema.get("items", {}), item, before, f"{path}[{index}]")


def _same_item(old: Any, item: Any, keys: Any) -> Any:
    if not keys or not isinstance(old, list):
        return None
    return next((o for o in old if all(o.get(key) == item.get(key) for key in keys)), None)


def _broken(rule: Object, value: Any, old: Any, path: str) -> WrongField | None:
    text = rule["rule"]
    program = _compile(text)
    import cel

    context = cel.Context(functions=dict(_FUNCTIONS))
    context.add_variable("self", value)
    if re.search(r"\boldSelf\b", text):
        if rule.get("optionalOldSelf"):
            optional = cel.OptionalValue
            context.add_variable("oldSelf", optional.none() if old is None else optional.of(old))
        elif old is None:
            return None
        else:
            context.add_variable("oldSelf", old)
    try:
        if program.execute(context):
            return None
        message = rule.get("message") or f"failed rule: {text}"
        if rule.get("messageExpression"):
            message = _compile(rule["messageExpression"]).execute(context)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        message = f"rule evaluation error: {error}: {text}"
    reason = rule.get("reason", "FieldValueInvalid")
    shown = _REASONS.get(reason) or f'Invalid value: "{_type_name(value)}"'
    where = path + rule.get("fieldPath", "")
    return WrongField(where.lstrip(".") or "<nil>", reason, f"{shown}: {message}")


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    return names.get(type(value), "number")
