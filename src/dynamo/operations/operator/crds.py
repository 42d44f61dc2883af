"""CustomResourceDefinitions, made from the types of `kinds.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operations.operator.kinds import GROUP, KINDS, CustomKind

MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
MANAGER = "dynamo-python"
"""The value of both labels. Helm writes its own name into the first one."""
LABELS = {MANAGED_BY: MANAGER, PART_OF: MANAGER}
DROPPED_KEYS = {"title", "$ref", "anyOf", "default"}
UNTYPED = "x-kubernetes-preserve-unknown-fields"


def custom_resources() -> Sequence[Mapping[str, Any]]:
    """Return the manifests of all kinds."""
    return [custom_resource(kind) for kind in KINDS]


def custom_resource(kind: CustomKind) -> Mapping[str, Any]:
    """Return the manifest of a kind. All of its versions have one schema, so that no webhook
    converts, and objects of each version can be read whether or not the operator runs."""
    names = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "shortNames": [kind.short],
        "singular": kind.kind.lower(),
    }
    spec = {
        "group": GROUP,
        "names": names,
        "scope": "Namespaced",
        "conversion": {"strategy": "None"},
        "versions": [_version(kind, name) for name in kind.versions],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}", "labels": dict(LABELS)},
        "spec": spec,
    }


def _version(kind: CustomKind, name: str) -> Mapping[str, Any]:
    subresources: dict[str, Any] = {"status": {}} if kind.status else {}
    if kind.scale:
        subresources["scale"] = dict(kind.scale)
    return {
        "name": name,
        "served": True,
        "storage": name == kind.versions[0],
        **({"subresources": subresources} if subresources else {}),
        "additionalPrinterColumns": [
            {"name": title, "type": column, "jsonPath": path}
            for title, column, path in kind.columns
        ],
        "schema": {"openAPIV3Schema": object_schema(kind)},
    }


def object_schema(kind: CustomKind) -> Mapping[str, Any]:
    """Return the structural schema of a kind's objects."""
    spec = structural_schema(kind.spec)
    if kind.rules:
        spec["x-kubernetes-validations"] = [dict(rule) for rule in kind.rules]
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    if kind.status is not None:
        properties["status"] = _without_defaults(structural_schema(kind.status))
    return {"type": "object", "properties": properties, "required": ["spec"]}


def structural_schema(of: type) -> dict[str, Any]:
    """Return the schema of a type as the API server wants it: without references and unions."""
    (schema,), parts = msgspec.json.schema_components([of], ref_template="{name}")
    return _inline(schema, parts)


def _inline(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in schema.items() if key not in DROPPED_KEYS}
    if reference := schema.get("$ref"):
        result = _inline(parts[reference], parts) | result
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    if choices and not result.get(UNTYPED):
        result |= _inline(choices[0], parts)
    if default := schema.get("default"):  # of None and of empty values nothing is to be filled in
        result["default"] = default
    if not result.get("required", True):
        del result["required"]
    if "enum" in result:
        result["enum"] = [value for value in result["enum"] if value is not None]
        result["type"] = "string"
    if "properties" in result:
        properties = {name: _inline(part, parts) for name, part in result["properties"].items()}
        result["properties"] = properties
    if "items" in result:
        result["items"] = _inline(result["items"], parts)
    if isinstance(result.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _inline(result["additionalProperties"], parts)
    return result


def _without_defaults(schema: Any) -> Any:
    """Return a schema by which nothing is filled in, since the operator writes a status whole."""
    if isinstance(schema, list):
        return [_without_defaults(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _without_defaults(part)
        for key, part in schema.items()
        if key != "default" or isinstance(part, Mapping)
    }
