"""JSON Schema of configuration files, with which editors complete and check them."""

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
    """Return the schema of a whole file. Aliases are included and name the setting's own key."""
    root = _schema_of(Settings)
    services = {"type": ["object", "null"], "description": "options of a service of this name"}
    return {
        "$schema": DIALECT,
        "title": "Dynamo configuration",
        **root,
        "patternProperties": {"^[A-Z]": services},
    }


def _schema_of(schema: SettingsSchema) -> dict[str, Any]:
    root: dict[str, Any] = _section_schema()
    for key, own_key in canonical_keys(schema).items():
        spec = setting_specs_by_key(schema)[own_key]
        *path, name = _split_key(key, spec)
        node = root
        for part in path:
            node = node["properties"].setdefault(part, _section_schema())
        own = _setting_schema(spec, key)
        section = node["properties"].get(name)  # `engine: mock` beside `engine: {kind: mock}`
        node["properties"][name] = {"anyOf": [section, own]} if section else own
    for name, description in section_descriptions(schema).items():
        root["properties"][name]["description"] = description
    return root


def _split_key(key: str, spec: SettingSpec) -> list[str]:
    """Return the parts of a key. `.nvidia.com/gpu` is a single part."""
    for alias in spec.meta.aliases:
        if "/" in alias and key.endswith(alias):
            return [*key.removesuffix(alias).split("."), alias.removeprefix(".")]
    return key.split(".")


def _section_schema() -> dict[str, Any]:
    return {"type": ["object", "null"], "properties": {}, "additionalProperties": False}


def _setting_schema(spec: SettingSpec, key: str) -> dict[str, Any]:
    meta = spec.meta
    notes = [] if key == spec.key else [f"same as {spec.key}"]
    notes += [meta.help] + ([f"in {meta.unit}"] if meta.unit else [])
    notes += ["not in use yet"] if meta.unused else []
    schema = _value_schema(spec) | {"description": "; ".join(notes)}
    if spec.default not in (None, (), {}) and not meta.secret:
        schema["default"] = spec.default
    return schema


def _value_schema(spec: SettingSpec) -> dict[str, Any]:
    meta = spec.meta
    if spec.entry_schema is not None:
        return {"type": "array", "items": _schema_of(spec.entry_schema)}
    name = type_name(spec)
    if name == "list":
        element = get_args(spec.type)[0]
        item = {str: "string", int: "integer", float: "number"}[element]
        return {"type": ["array", "string", "number"], "items": {"type": item}}
    if name == "mapping":
        return {"type": ["object", "string"]}
    kinds = [JSON_TYPES[name]]
    if type(None) in get_args(spec.type):
        kinds.append("null")
    if meta.choices:
        choices = [*meta.choices, *dict(meta.spellings), *dict(meta.not_yet)]
        return {"anyOf": [{"enum": list(dict.fromkeys(choices))}, {"type": kinds}]}
    if meta.unit in UNITS_ALLOWING_TEXT:
        kinds.append("string")
    limits = {"minimum": meta.ge, "maximum": meta.le}
    return {"type": kinds} | {name: limit for name, limit in limits.items() if limit is not None}
