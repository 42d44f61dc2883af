"""Owners of fields (`metadata.managedFields`) and server-side apply."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dynamo.testing.kubernetes.failures import ApiFailure, WrongField
from dynamo.testing.kubernetes.kinds import Object, list_keys

Path = tuple[str, ...]
"""Parts in the form of `fieldsV1`: `f:name`, `k:{...}` or `v:...`."""
Owner = tuple[str, str, str, str]
"""Manager, operation, subresource, apiVersion."""
_UNOWNED = {
    ("f:metadata", f"f:{name}")
    for name in (
        "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
        "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink",
    )
} | {("f:apiVersion",), ("f:kind",)}  # fmt: skip
_KEY_DEFAULTS = {"protocol": "TCP"}


def _below(schema: Object | None, name: str) -> Object | None:
    if schema is None or name == "metadata":
        return None
    extra = schema.get("additionalProperties")
    by_path = schema.get("properties", {}).get(name)
    return by_path or (extra if isinstance(extra, dict) else {})


def _item_key(item: Any, keys: tuple[str, ...]) -> str:
    if not keys:
        return "v:" + json.dumps(item)
    values = {key: item.get(key, _KEY_DEFAULTS.get(key)) for key in keys}
    return "k:" + json.dumps(
        {key: value for key, value in values.items() if value is not None},
        separators=(",", ":"),
        sort_keys=True,
    )


def leaves(
    schema: Object | None, value: Any, path: Path = (), name: str = "", owner: str = ""
) -> dict[Path, Any]:
    """Return the values of an object by the paths that owners have. `schema` is None in built-in
    objects."""
    if path in _UNOWNED:
        return {}
    if isinstance(value, dict) and (schema or {}).get("x-kubernetes-map-type") != "atomic":
        by_path: dict[Path, Any] = {} if value or not path else {path: value}
        for key, part in value.items():
            by_path |= leaves(_below(schema, key), part, (*path, f"f:{key}"), key, name)
        return by_path
    keys = list_keys(schema, name, owner) if isinstance(value, list) else None
    if keys is None:
        return {path: value}
    by_path = {} if value else {path: value}
    items = None if schema is None else schema.get("items", {})
    for item in value:
        below = (*path, _item_key(item, keys))
        by_path[below] = None if keys else item
        if keys:
            by_path |= leaves(items, item, below, "", name)
    return by_path


def merge(schema: Object | None, live: Any, applied: Any, name: str = "", owner: str = "") -> Any:
    """Return the live value with the fields of the applied one."""
    if isinstance(applied, dict) and isinstance(live, dict):
        if (schema or {}).get("x-kubernetes-map-type") == "atomic":
            return applied
        merged = dict(live)
        for key, part in applied.items():
            merged[key] = merge(_below(schema, key), live.get(key), part, key, name)
        return merged
    keys = list_keys(schema, name, owner) if isinstance(applied, list) else None
    if keys is None or not isinstance(live, list):
        return applied
    items = None if schema is None else schema.get("items", {})
    by_key = {_item_key(item, keys): item for item in live}
    for item in applied:
        key = _item_key(item, keys)
        by_key[key] = merge(items, by_key[key], item, "", name) if key in by_key and keys else item
    return list(by_key.values())


def remove(
    schema: Object | None, value: Any, paths: set[Path], path: Path = (), name: str = "",
    owner: str = "",
) -> Any:  # fmt: skip
    """Return a value without the paths, None if they leave it empty."""
    if isinstance(value, dict):
        rest_of_map = {}
        for key, part in value.items():
            below = (*path, f"f:{key}")
            if below in paths:
                continue
            rest = remove(_below(schema, key), part, paths, below, key, name)
            if rest is not None or part is None:
                rest_of_map[key] = rest
        return rest_of_map if rest_of_map or not value else None
    keys = list_keys(schema, name, owner) if isinstance(value, list) else None
    if keys is None:
        return value
    items = None if schema is None else schema.get("items", {})
    rests = []
    for item in value:
        below = (*path, _item_key(item, keys))
        if below not in paths:
            rests.append(remove(items, item, paths, below, "", name) if keys else item)
    return rests or (None if value else [])


def read_owners(item: Object) -> dict[Owner, set[Path]]:
    """Return the paths of each owner."""
    owners = {}
    for entry in item["metadata"].get("managedFields") or ():
        owner = (
            entry["manager"], entry["operation"], entry.get("subresource", ""), entry["apiVersion"],
        )  # fmt: skip
        owners[owner] = set(_read_fields(entry.get("fieldsV1", {}), ()))
    return owners


def _read_fields(fields: Object, path: Path) -> Iterable[Path]:
    if not fields:
        yield path
    for name, below in fields.items():
        if name == ".":
            yield path
        else:
            yield from _read_fields(below, (*path, name))


def _write_fields(paths: Iterable[Path]) -> Object:
    fields: Object = {}
    for path in sorted(paths):
        place = fields
        for part in path:
            place = place.setdefault(part, {})
    for path in paths:  # an item of a list is owned beside its fields
        place = fields
        for part in path:
            place = place[part]
        if place:
            place["."] = {}
    return fields


def write_owners(
    item: Object, owners: Mapping[Owner, set[Path]], present: Iterable[Path], now: str
) -> Object:
    """Return an object with its owners, without paths that it does not have. The time of an entry
    changes with its fields."""
    known = set(present)
    old = {
        (e["manager"], e["operation"], e.get("subresource", ""), e["apiVersion"]): e
        for e in item["metadata"].get("managedFields") or ()
    }
    entries = []
    for owner, paths in owners.items():
        manager, operation, subresource, api_version = owner
        if not (owned := paths & known):
            continue
        fields = _write_fields(owned)
        entry = {
            "manager": manager, "operation": operation, "apiVersion": api_version, "time": now,
            "fieldsType": "FieldsV1", "fieldsV1": fields,
        }  # fmt: skip
        if subresource:
            entry["subresource"] = subresource
        before = old.get(owner)
        entries.append(before if before and before["fieldsV1"] == fields else entry)
    metadata = {key: v for key, v in item["metadata"].items() if key != "managedFields"}
    return item | {"metadata": metadata | ({"managedFields": entries} if entries else {})}


def take_ownership(
    owner: Owner, schema: Object | None, before: Object | None, after: Object
) -> dict[Owner, set[Path]]:
    """Return the owners after a write that is no apply: the writer owns what changed."""
    owners = read_owners(after if before is None else before)
    old = {} if before is None else leaves(schema, before)
    new = leaves(schema, after)
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    for other, paths in owners.items():
        if other != owner:
            paths -= {path for path in changed if path in old}
    owners[owner] = owners.get(owner, set()) | changed
    return owners


def apply(
    owner: Owner, schema: Object | None, live: Object, applied: Object, *, force: bool
) -> tuple[Object, dict[Owner, set[Path]]]:
    """Return the object and its owners after a server-side apply. Raises `ApiFailure` 409."""
    owners = read_owners(live)
    wanted, present = leaves(schema, applied), leaves(schema, live)
    conflicts: dict[Path, Owner] = {}
    for path, value in wanted.items():
        if path in present and present[path] == value:
            continue
        for other, paths in owners.items():
            if other[:3] != owner[:3] and path in paths:
                conflicts[path] = other
    if conflicts and not force:
        raise _conflict(conflicts)
    for path, other in conflicts.items():
        owners[other].discard(path)
    merged = merge(schema, live, applied)
    former = set[Path]().union(*(p for o, p in owners.items() if o[:3] == owner[:3]))
    owners = {other: paths for other, paths in owners.items() if other[:3] != owner[:3]}
    others = set[Path]().union(*owners.values())
    gone = {path for path in former - wanted.keys() - others if not _has_below(path, others)}
    if gone:
        merged = remove(schema, merged, gone) or {}
    owners[owner] = set(wanted)
    return merged, owners


def _has_below(path: Path, others: set[Path]) -> bool:
    return path[-1][0] == "k" and any(other[: len(path)] == path for other in others)


def _conflict(conflicts: Mapping[Path, Owner]) -> ApiFailure:
    causes = []
    for path, (manager, operation, _, api_version) in conflicts.items():
        using = f" using {api_version}" if operation == "Update" else ""
        field = "".join(f".{p[2:]}" if p[0] == "f" else f"[{p[2:]}]" for p in path)
        text = f'conflict with "{manager}"{using}'
        causes.append(WrongField(field, "FieldManagerConflict", text))
    count = "1 conflict" if len(causes) == 1 else f"{len(causes)} conflicts"
    listed = "\n".join(f"- {cause.field}: {cause.message}" for cause in causes)
    text = f"Apply failed with {count}: {listed}"
    return ApiFailure(409, text, causes=causes)
