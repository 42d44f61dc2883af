"""Whether a live object lacks anything of what is to be applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.operations.operator.merge import MERGE_KEYS
from dynamo.operations.placement.quantity import parse_quantity

QUANTITIES = ("limits", "requests", "sizeLimit")


def lacks(live: Any, wanted: Any, field: str = "", parent: str = "") -> bool:
    """Whether a live value lacks anything of a wanted one. Fields that only the live one has are
    the server's defaults, or others'."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return bool(wanted) or live is not None
        return any(lacks(live.get(name), value, name, field) for name, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return bool(wanted)
        key = MERGE_KEYS.get(field, "")
        if not all(isinstance(item, Mapping) and key in item for item in wanted):
            return len(live) != len(wanted) or any(
                lacks(*pair) for pair in zip(live, wanted, strict=True)
            )
        by_key = {item.get(key): item for item in live if isinstance(item, Mapping)}
        return any(lacks(by_key.get(item.get(key)), item) for item in wanted)
    if live == wanted:
        return False
    if field == "sizeLimit" or parent in QUANTITIES:
        try:
            return parse_quantity(live) != parse_quantity(wanted)
        except ValueError:
            return True
    return bool(wanted) or live is not None
