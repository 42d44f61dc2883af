"""Documents of the API server about itself: versions, groups, resources, OpenAPI, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynamo.testing.kubernetes.kinds import Column, Kind, Object
from dynamo.testing.kubernetes.selectors import get_path

VERSION = {
    "major": "1", "minor": "37", "gitVersion": "v1.37.0", "gitCommit": "0", "platform": "test",
    "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "", "compiler": "",
}  # fmt: skip
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def groups(kinds: Iterable[Kind]) -> dict[str, list[str]]:
    """Return the versions of each group, the preferred one first."""
    versions_by_group: dict[str, list[str]] = {}
    for kind in kinds:
        versions = versions_by_group.setdefault(kind.group, [])
        versions += [version for version in kind.versions if version not in versions]
    return versions_by_group


def group_list(kinds: Iterable[Kind]) -> Object:
    """Return the answer of `/apis`."""
    listed = []
    for group, versions in groups(kinds).items():
        if group:
            listed.append(_group(group, versions))
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _group(group: str, versions: Sequence[str]) -> Object:
    forms = [{"groupVersion": f"{group}/{v}", "version": v} for v in versions]
    return {"name": group, "versions": forms, "preferredVersion": forms[0]}


def one_group(kinds: Iterable[Kind], group: str) -> Object | None:
    """Return the answer of `/apis/GROUP`, None for an unknown one."""
    versions = groups(kinds).get(group)
    if not versions:
        return None
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, versions)}


def resource_list(kinds: Iterable[Kind], group: str, version: str) -> Object | None:
    """Return the answer of `/apis/GROUP/VERSION`, None for an unknown one."""
    resources: list[Object] = []
    for kind in kinds:
        if kind.group != group or version not in kind.versions:
            continue
        resource = {
            "name": kind.plural, "singularName": kind.singular or kind.name.lower(),
            "namespaced": kind.namespaced, "kind": kind.name, "verbs": _VERBS,
            "shortNames": list(kind.short), "categories": list(kind.categories),
        }  # fmt: skip
        resources.append(resource)
        below = {"namespaced": kind.namespaced, "verbs": ["get", "patch", "update"]}
        if kind.has_status:
            part = {"name": f"{kind.plural}/status", "singularName": "", "kind": kind.name}
            resources.append(part | below)
        if kind.id == "pods":
            part = {"name": "pods/eviction", "singularName": "", "kind": "Eviction"}
            resources.append(part | below | {"group": "policy", "version": "v1"})
        if kind.scale:
            part = {"name": f"{kind.plural}/scale", "singularName": "", "kind": "Scale"}
            resources.append(part | below | {"group": "autoscaling", "version": "v1"})
    if not resources:
        return None
    return {
        "kind": "APIResourceList", "apiVersion": "v1", "resources": resources,
        "groupVersion": f"{group}/{version}" if group else version,
    }  # fmt: skip


def openapi_index(kinds: Iterable[Kind]) -> Object:
    """Return the answer of `/openapi/v3`."""
    paths = {}
    for group, versions in groups(kinds).items():
        for version in versions:
            name = f"apis/{group}/{version}" if group else f"api/{version}"
            paths[name] = {"serverRelativeURL": f"/openapi/v3/{name}"}
    return {"paths": paths}


def openapi(kinds: Iterable[Kind], group: str, version: str) -> Object:
    """Return the OpenAPI document of a group's version, with what clients validate by."""
    schemas: Object = {}
    paths: Object = {}
    for kind in kinds:
        if kind.group != group or version not in kind.versions:
            continue
        identity = {"group": group, "version": version, "kind": kind.name}
        schema = kind.schemas.get(version, {"type": "object"})
        meta = {
            "apiVersion": {"type": "string"}, "kind": {"type": "string"},
            "metadata": {"type": "object"},
        }  # fmt: skip
        name = f"{group or 'core'}.{version}.{kind.name}"
        schemas[name] = schema | {
            "properties": schema.get("properties", {}) | meta,
            "x-kubernetes-group-version-kind": [identity],
        }
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        where = f"{base}/namespaces/{{namespace}}" if kind.namespaced else base
        validated = [{"name": n, "in": "query"} for n in ("dryRun", "fieldValidation")]
        names = [{"name": "name", "in": "path"}] * 1
        paths[f"{where}/{kind.plural}"] = {
            "post": _operation("post", identity, validated),
            "get": _operation("list", identity, []),
        }
        paths[f"{where}/{kind.plural}/{{name}}"] = {
            "get": _operation("get", identity, names),
            "patch": _operation("patch", identity, validated),
            "put": _operation("put", identity, validated),
        }
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {
        "openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}
    }  # fmt: skip


def _operation(action: str, identity: Object, parameters: Sequence[Object]) -> Object:
    return {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": identity,
        "parameters": list(parameters),
        "responses": {"200": {"description": "OK"}},
    }


def table(kind: Kind, version: str, items: Sequence[Object], metadata: Object, now: str) -> Object:
    """Return objects as the table that `kubectl get` prints."""
    columns = kind.columns.get(version) or []
    if not any(column.name.lower() == "age" for column in columns):
        columns = [*columns, Column("Age", ".metadata.creationTimestamp", "date")]
    definitions = [{"name": "Name", "type": "string", "format": "name", "priority": 0}]
    definitions += [
        {"name": column.name, "type": column.type, "format": "", "priority": 0}
        for column in columns
    ]
    rows = []
    for item in items:
        partial = {
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": item["metadata"],
        }  # fmt: skip
        cells = [item["metadata"]["name"], *(_cell(column, item, now) for column in columns)]
        rows.append({"cells": cells, "object": partial})
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": definitions, "rows": rows,
    }  # fmt: skip


def _cell(column: Column, item: Object, now: str) -> Any:
    value = get_path(item, column.path)
    if column.type != "date" or not isinstance(value, str):
        return "" if value is None else value
    from datetime import datetime

    seconds = (datetime.fromisoformat(now) - datetime.fromisoformat(value)).total_seconds()
    return f"{seconds:.0f}s" if seconds < 120 else f"{seconds / 60:.0f}m"
