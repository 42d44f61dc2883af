"""JSON patches, merge patches and strategic merge patches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object, list_keys


def merge_patch(value: Any, patch: Any) -> Any:
    """Return a value after a JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for name, part in patch.items():
        if part is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), part)
    return merged


def json_patch(value: Any, operations: Sequence[Object]) -> Any:
    """Return a value after a JSON patch. Raises `ApiFailure`."""
    value = deepcopy(value)
    for operation in operations:
        try:
            _apply_operation(value, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            text = f"the server rejected our request due to an error in our request: {error}"
            raise ApiFailure(422, text) from None
    return value


def _apply_operation(document: Any, operation: Object) -> None:
    kind = operation["op"]
    parent, name = _resolve(document, operation["path"])
    if kind in ("move", "copy"):
        source, key = _resolve(document, operation["from"])
        value = deepcopy(source[key])
        if kind == "move":
            del source[key]
        kind = "add"
    else:
        value = operation.get("value")
    if kind == "test":
        if parent[name] != value:
            raise ValueError(f"testing value {operation['path']} failed")
    elif kind == "remove":
        del parent[name]
    elif kind == "add" and isinstance(parent, list):
        parent.insert(len(parent) if name == "-" else name, value)
    elif kind in ("add", "replace"):
        if kind == "replace":
            parent[name]
        parent[name] = value


def _resolve(document: Any, pointer: str) -> tuple[Any, Any]:
    """Return the container and the last key of a JSON pointer."""
    *parts, last = (
        part.replace("~1", "/").replace("~0", "~") for part in pointer.removeprefix("/").split("/")
    )
    for part in parts:
        document = document[int(part) if isinstance(document, list) else part]
    return document, int(last) if isinstance(document, list) and last != "-" else last


def strategic_merge(value: Any, patch: Any, name: str = "", owner: str = "") -> Any:
    """Return a value of a built-in object after a strategic merge patch. `name` and `owner` are
    the field of the value and the field around it."""
    if isinstance(patch, list):
        return _merge_list(value, patch, name, owner)
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {key: part for key, part in patch.items() if key != "$patch"}
    merged = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        field = key.partition("/")[2]
        if key.startswith("$deleteFromPrimitiveList/"):
            merged[field] = [item for item in merged.get(field, ()) if item not in part]
        elif key.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        elif part is None:
            merged.pop(key, None)
        else:
            merged[key] = strategic_merge(merged.get(key), part, key, name)
    return merged


def _merge_list(value: Any, patch: list[Any], name: str, owner: str) -> list[Any]:
    keys = list_keys(None, name, owner)
    if keys == ():
        return list(dict.fromkeys([*(value or ()), *patch]))
    if keys is None or any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if not (isinstance(item, dict) and "$patch" in item)]
    merged = list(value or ())
    for item in patch:
        place = next(
            (i for i, old in enumerate(merged) if old.get(keys[0]) == item.get(keys[0])), None
        )
        if item.get("$patch") == "delete":
            if place is not None:
                del merged[place]
        elif place is None:
            merged.append(strategic_merge({}, item, "", name))
        else:
            merged[place] = strategic_merge(merged[place], item, "", name)
    return merged
