"""Rewrites JSON schemas into keywords that llguidance enforces, with the same meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dynamo.models.grammar.refusal import subschemas

STANDARD_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
"""The formats of JSON Schema. Others are annotations, which every instance satisfies."""
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_REWRITTEN = ("format", "uniqueItems", *_DEPENDENCIES)


def rewrite_schema(schema: str) -> str:
    """Return a schema in JSON without formats of no standard and `uniqueItems: false`, and with
    choices in place of dependencies. Most schemas have none of these and are returned unchanged."""
    if not any(f'"{keyword}"' in schema for keyword in _REWRITTEN):
        return schema
    document = msgspec.json.decode(schema)
    for _, node in tuple(subschemas(document, "")):
        _rewrite_node(node)
    return msgspec.json.encode(document).decode()


def _rewrite_node(node: dict[str, Any]) -> None:
    form = node.get("format")
    if isinstance(form, str) and form not in STANDARD_FORMATS:
        del node["format"]
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    choices = [
        choice
        for keyword in _DEPENDENCIES
        if isinstance(node.get(keyword), Mapping)
        for choice in _choices(node.pop(keyword))
    ]
    parts = node.get("allOf", [])
    if choices and isinstance(parts, list):
        node["allOf"] = [*parts, *choices]


def _choices(dependencies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a choice for each property: it is missing, or what depends on it holds."""
    for name, needed in dependencies.items():
        holds = {"required": needed} if isinstance(needed, list) else needed
        if needed not in ([], {}, True):
            yield {"anyOf": [{"properties": {name: False}}, holds]}
