"""Reload: which changes of the settings are applied while serving."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dynamo.core.settings.declare import iter_setting_specs
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import shown_value

T = TypeVar("T", bound=msgspec.Struct)


class SettingChange(msgspec.Struct, frozen=True):
    """A changed setting. `applied`: the change takes effect at once, else at the next start."""

    key: str
    before: Any
    after: Any
    applied: bool


def apply_reload(
    current: Settings, reloaded: Settings
) -> tuple[Settings, tuple[SettingChange, ...]]:
    """Return `current` with the reloadable changes of `reloaded`, and all changes."""
    changes = []
    for spec in iter_setting_specs(Settings):
        get_value = attrgetter(spec.key)
        before, after = get_value(current), get_value(reloaded)
        if before == after:
            continue
        if spec.meta.reload:
            current = replace_setting(current, spec.key, after)
        shown = shown_value(spec, before), shown_value(spec, after)
        changes.append(SettingChange(spec.key, *shown, spec.meta.reload))
    return current, tuple(changes)


def replace_setting(section: T, key: str, value: Any) -> T:
    """Return `section` with another value of the setting with this dotted key."""
    name, _, rest = key.partition(".")
    inner = replace_setting(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
