"""What a setting is, where that was said, and what is to be known of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.load import DEFAULT_ORIGIN, UNUSED_NOTE, LoadedSettings

REDACTED = "***"


def get_setting(settings: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


class EffectiveSetting(msgspec.Struct, frozen=True):
    """One effective value. `origin`: "default", "flag --x", "environment X" or "file:line"."""

    key: str
    value: Any
    unit: str
    origin: str
    default: Any
    note: str
    help: str


def effective_settings(loaded: LoadedSettings) -> Iterator[EffectiveSetting]:
    """Every setting, in the order of the schema; entries of lists one by one."""
    for declared in setting_specs_by_key().values():
        yield from _effective_settings(loaded, declared, loaded.settings, "")


def _effective_settings(
    loaded: LoadedSettings, declared: SettingSpec, root: Any, prefix: str
) -> Iterator[EffectiveSetting]:
    value = get_setting(root, declared.key)
    key = f"{prefix}{declared.key}"
    if declared.entry_schema is not None and value:
        for at, entry in enumerate(value):
            for inner in setting_specs_by_key(declared.entry_schema).values():
                yield from _effective_settings(loaded, inner, entry, f"{key}[{at}].")
        return
    hidden = declared.meta.secret and value
    yield EffectiveSetting(
        key=key,
        value=REDACTED if hidden else value,
        unit=declared.meta.unit,
        origin=loaded.origins.get(key, DEFAULT_ORIGIN),
        default=declared.default,
        note=loaded.notes.get(key, UNUSED_NOTE if declared.meta.unused else ""),
        help=declared.meta.help,
    )
