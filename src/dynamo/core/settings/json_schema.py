"""The settings as JSON Schema, by which editors complete and check a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.keys import (
    SettingsSchema,
    canonical_keys,
    section_descriptions,
    setting_specs_by_key,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import type_name

DIALECT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "text": "string"}
UNITS_ALLOWING_TEXT = ("bytes", "seconds", "milliseconds", "GiB", "cores")


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


def _schema_of(schema: SettingsSchema) -> dict[str, Any]:
    root: dict[str, Any] = _section_schema("")
    for key, own in canonical_keys(schema).items():
        declared = setting_specs_by_key(schema)[own]
        *path, name = _split_key(key, declared)
        node = root
        for part in path:
            node = node["properties"].setdefault(part, _section_schema(""))
        node["properties"][name] = _setting_schema(declared, key)
    for name, about in section_descriptions(schema).items():
        root["properties"][name]["description"] = about
    return root


def _split_key(key: str, declared: SettingSpec) -> list[str]:
    """Parts of a key; `.nvidia.com/gpu` is one part."""
    for alias in declared.meta.aliases:
        if "/" in alias and key.endswith(alias):
            return [*key.removesuffix(alias).split("."), alias.removeprefix(".")]
    return key.split(".")


def _section_schema(about: str) -> dict[str, Any]:
    made = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
    return made | ({"description": about} if about else {})


def _setting_schema(declared: SettingSpec, key: str) -> dict[str, Any]:
    about = declared.meta
    notes = [] if key == declared.key else [f"same as {declared.key}"]
    notes += [about.help] + ([f"in {about.unit}"] if about.unit else [])
    notes += ["not in use yet"] if about.unused else []
    made = _value_schema(declared) | {"description": "; ".join(notes)}
    if declared.default not in (None, ()) and not about.secret:
        made["default"] = declared.default
    return made


def _value_schema(declared: SettingSpec) -> dict[str, Any]:
    about = declared.meta
    if declared.entry_schema is not None:
        return {"type": "array", "items": _schema_of(declared.entry_schema)}
    name = type_name(declared)
    if name == "list":
        element = get_args(declared.type)[0]
        item = {str: "string", int: "integer", float: "number"}[element]
        return {"type": ["array", "string", "number"], "items": {"type": item}}
    kinds = [JSON_TYPES[name]]
    if type(None) in get_args(declared.type):
        kinds.append("null")
    if about.choices:
        words = [*about.choices, *dict(about.spellings), *dict(about.not_yet)]
        return {"anyOf": [{"enum": list(dict.fromkeys(words))}, {"type": kinds}]}
    if about.unit in UNITS_ALLOWING_TEXT:
        kinds.append("string")
    limits = {"minimum": about.ge, "maximum": about.le}
    return {"type": kinds} | {word: limit for word, limit in limits.items() if limit is not None}
