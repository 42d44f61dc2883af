"""Strategic merge of a pod template over its defaults: lists are merged by the names of their
items, and what the user wrote wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
}
DEEP_ITEMS = ("containers", "initContainers")
"""Lists whose items are merged. Items of the others replace the default with the same key."""
WHOLE = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "affinity")
"""Objects that are of the user or of the defaults as a whole, such as a probe with its handler."""
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")


def merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` over `defaults`. A null takes the default away."""
    result = dict(defaults)
    for name, value in own.items():
        default = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(default, Mapping) and name not in WHOLE:
            result[name] = merge(default, value)
        elif isinstance(value, list) and isinstance(default, list) and name in MERGE_KEYS:
            result[name] = _merge_lists(default, value, name)
        else:
            result[name] = value
    return result


def _merge_lists(defaults: list[Any], own: list[Any], field: str) -> list[Any]:
    """Return the user's items, behind the defaults that they do not replace."""
    key = MERGE_KEYS[field]
    by_key = {item.get(key): item for item in defaults if isinstance(item, Mapping)}
    taken = {item.get(key) for item in own if isinstance(item, Mapping)}
    names = {item.get("name") for item in own if isinstance(item, Mapping)}
    rest = [item for at, item in by_key.items() if at not in taken]
    if field == "ports":  # names of ports are unique, too
        rest = [item for item in rest if item.get("name") not in names]
    if field not in DEEP_ITEMS:
        return [*rest, *own]
    return [*rest, *(merge(by_key.get(item.get("name"), {}), item) for item in own)]


def own_path(path: str, merged: Any, own: Any) -> str | None:
    """Return the path in the user's own template of a field of the merged one. None: the field is a
    default."""
    result = ""
    parent = ""
    for name, step in _STEP.findall(path):
        index = step
        if step.startswith('name="') and isinstance(merged, list):
            names = [item.get("name") for item in merged]
            index = str(names.index(step[6:-1])) if step[6:-1] in names else step
        if name or not index.isdigit():
            merged = merged.get(name) if isinstance(merged, Mapping) else None
            own = own.get(name) if isinstance(own, Mapping) else None
            result += f".{name}" if name else f"[{index}]"
            parent = name
            continue
        item = merged[int(index)] if isinstance(merged, list) and int(index) < len(merged) else None
        at = int(index)
        key = MERGE_KEYS.get(parent)
        if key and isinstance(own, list) and isinstance(item, Mapping):
            wanted = [n for n, x in enumerate(own) if x.get(key) == item.get(key)]
            if not wanted:
                return None
            at = wanted[0]
        merged = item
        own = own[at] if isinstance(own, list) and at < len(own) else None
        result += f"[{at}]"
    return result.lstrip(".")
