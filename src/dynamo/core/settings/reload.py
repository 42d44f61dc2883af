"""Settings read again while they are in use: what of them may take effect at once."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.settings.explain import HIDDEN, value_at
from dynamo.core.settings.names import declared_settings
from dynamo.core.settings.schema import Settings


class Change(msgspec.Struct, frozen=True):
    """One setting that is not what it was. `applied`: it takes effect at once, else at a start."""

    key: str
    before: Any
    after: Any
    applied: bool


def reloaded(now: Settings, wanted: Settings) -> tuple[Settings, tuple[Change, ...]]:
    """`now` with all of `wanted` that is safe to change while serving, and every difference."""
    changes = []
    for key, declared in declared_settings().items():
        before, after = value_at(now, key), value_at(wanted, key)
        if before == after:
            continue
        about = declared.about
        if about.reload:
            now = _with(now, key.split("."), after)
        if about.secret:
            before = after = HIDDEN
        changes.append(Change(key, before, after, about.reload))
    return now, tuple(changes)


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _with(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
