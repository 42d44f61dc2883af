"""The settings as JSON Schema, by which editors complete and check a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from dynamo.core.settings.declare import Declared
from dynamo.core.settings.names import Schema, declared_settings, sections, spellings
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import type_name

DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS = {"int": "integer", "float": "number", "bool": "boolean", "text": "string"}
WITH_UNITS = ("bytes", "seconds", "milliseconds", "GiB", "cores")


def json_schema() -> Mapping[str, Any]:
    """Of a whole file; other spellings are known too, and say what they stand for."""
    root = _schema_of(Settings)
    services = {"type": ["object", "null"], "description": "options of a service of this name"}
    return {
        "$schema": DIALECT,
        "title": "Dynamo configuration",
        **root,
        "patternProperties": {"^[A-Z]": services},
    }


def _schema_of(schema: Schema) -> dict[str, Any]:
    root: dict[str, Any] = _section("")
    for key, own in spellings(schema).items():
        declared = declared_settings(schema)[own]
        *path, name = _split(key, declared)
        node = root
        for part in path:
            node = node["properties"].setdefault(part, _section(""))
        node["properties"][name] = _setting(declared, key)
    for name, about in sections(schema).items():
        root["properties"][name]["description"] = about
    return root


def _split(key: str, declared: Declared) -> list[str]:
    """Parts of a key; `.nvidia.com/gpu` is one part."""
    for alias in declared.about.aliases:
        if "/" in alias and key.endswith(alias):
            return [*key.removesuffix(alias).split("."), alias.removeprefix(".")]
    return key.split(".")


def _section(about: str) -> dict[str, Any]:
    made = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
    return made | ({"description": about} if about else {})


def _setting(declared: Declared, key: str) -> dict[str, Any]:
    about = declared.about
    notes = [] if key == declared.key else [f"same as {declared.key}"]
    notes += [about.help] + ([f"in {about.unit}"] if about.unit else [])
    notes += ["not in use yet"] if about.unused else []
    made = _type(declared) | {"description": "; ".join(notes)}
    if declared.default not in (None, ()) and not about.secret:
        made["default"] = declared.default
    return made


def _type(declared: Declared) -> dict[str, Any]:
    about = declared.about
    if declared.entries is not None:
        return {"type": "array", "items": _schema_of(declared.entries)}
    name = type_name(declared)
    if name == "list":
        element = get_args(declared.type)[0]
        item = {str: "string", int: "integer", float: "number"}[element]
        return {"type": ["array", "string", "number"], "items": {"type": item}}
    kinds = [KINDS[name]]
    if type(None) in get_args(declared.type):
        kinds.append("null")
    if about.choices:
        words = [*about.choices, *dict(about.spellings), *dict(about.not_yet)]
        return {"anyOf": [{"enum": list(dict.fromkeys(words))}, {"type": kinds}]}
    if about.unit in WITH_UNITS:
        kinds.append("string")
    limits = {"minimum": about.ge, "maximum": about.le}
    return {"type": kinds} | {word: limit for word, limit in limits.items() if limit is not None}
