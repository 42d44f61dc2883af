"""What a setting is, where that was said, and what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.core.settings.declare import Declared
from dynamo.core.settings.load import DEFAULT, UNUSED, Loaded
from dynamo.core.settings.names import declared_settings

HIDDEN = "***"


def value_at(settings: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


class Explained(msgspec.Struct, frozen=True):
    """One effective value. `origin`: "default", "flag --x", "environment X" or "file:line"."""

    key: str
    value: Any
    unit: str
    origin: str
    default: Any
    note: str
    help: str


def explain(loaded: Loaded) -> Iterator[Explained]:
    """Every setting, in the order of the schema; entries of lists one by one."""
    for declared in declared_settings().values():
        yield from _explain(loaded, declared, loaded.settings, "")


def _explain(loaded: Loaded, declared: Declared, root: Any, prefix: str) -> Iterator[Explained]:
    value = value_at(root, declared.key)
    key = f"{prefix}{declared.key}"
    if declared.entries is not None and value:
        for at, entry in enumerate(value):
            for inner in declared_settings(declared.entries).values():
                yield from _explain(loaded, inner, entry, f"{key}[{at}].")
        return
    hidden = declared.about.secret and value
    yield Explained(
        key=key,
        value=HIDDEN if hidden else value,
        unit=declared.about.unit,
        origin=loaded.origins.get(key, DEFAULT),
        default=declared.default,
        note=loaded.notes.get(key, UNUSED if declared.about.unused else ""),
        help=declared.about.help,
    )
