"""The schemas that Kubernetes publishes of its own kinds, of the package `kubernetes-validate`."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from dynamo.testing.kubernetes.kinds import Kind, Object

_FREE: Object = {"x-kubernetes-preserve-unknown-fields": True}
_UNTYPED = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": _FREE,
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"x-kubernetes-int-or-string": True},
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps": _FREE,
}


@cache
def published_schema(kind: Kind, version: str) -> Object | None:
    """Return the structural schema of a built-in kind, None without the package or the kind."""
    parts = (kind.name.lower(), kind.group.partition(".")[0], version)
    try:
        return _structural(_document("-".join(filter(None, parts))))
    except (ImportError, FileNotFoundError):
        return None


@cache
def _document(name: str) -> Any:
    import kubernetes_validate

    folder = f"v{kubernetes_validate.latest_version()}-local-strict"
    path = files(kubernetes_validate) / "kubernetes-json-schema" / folder / f"{name}.json"
    return json.loads(path.read_text())


@cache
def _definition(name: str) -> Object:
    return _UNTYPED.get(name) or _structural(_document("_definitions")["$defs"][name])


def _structural(schema: Object) -> Object:
    """Return a schema without references, with null as `nullable`."""
    if "$ref" in schema:
        return _definition(schema["$ref"].rpartition("/")[2])
    kinds = schema.get("type", [])
    result: Object = {"type": kinds} if isinstance(kinds, str) else {"type": kinds[0]}
    result |= {"nullable": "null" in kinds, "required": schema.get("required", ())}
    below = {name: schema[name] for name in ("items", "additionalProperties") if schema.get(name)}
    result |= {name: _structural(part) for name, part in below.items()}
    properties = schema.get("properties", {})
    result["properties"] = {name: _structural(part) for name, part in properties.items()}
    return result if properties or below else {**_FREE, **result}
