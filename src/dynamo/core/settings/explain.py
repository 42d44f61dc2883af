"""Effective settings: each value, its origin and notes on it (`dynamo config explain`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import msgspec

from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.load import DEFAULT_ORIGIN, UNUSED_NOTE, LoadedSettings
from dynamo.core.settings.values import shown_value


class EffectiveSetting(msgspec.Struct, frozen=True):
    """An effective value. `origin`: "default", "flag --x", "environment X" or "file:line"."""

    key: str
    value: Any
    unit: str
    origin: str
    default: Any
    note: str
    help: str


def effective_settings(loaded: LoadedSettings) -> Iterator[EffectiveSetting]:
    """Yield every setting in the order of the schema. Entries of lists come one by one."""
    for spec in setting_specs_by_key().values():
        yield from _effective_settings(loaded, spec, "")


def changed_settings(settings: msgspec.Struct) -> Mapping[str, Any]:
    """Return the settings that are no defaults by key, without secrets."""
    changed: dict[str, Any] = {}
    for spec in setting_specs_by_key(type(settings)).values():
        try:
            value: Any = reduce(getattr, spec.key.split("."), settings)
        except AttributeError:  # the file of a secret, or a setting without effect
            continue
        if spec.entry_schema is not None:
            for index, entry in enumerate(value):
                of_entry = changed_settings(entry).items()
                changed |= {f"{spec.key}[{index}].{key}": of_key for key, of_key in of_entry}
        elif value != spec.default:
            changed[spec.key] = shown_value(spec, value)
    return changed


def _effective_settings(
    loaded: LoadedSettings, spec: SettingSpec, prefix: str
) -> Iterator[EffectiveSetting]:
    key = f"{prefix}{spec.key}"
    value = loaded.values[key]
    if spec.entry_schema is not None and value:
        for index in range(len(value)):
            for entry_spec in setting_specs_by_key(spec.entry_schema).values():
                yield from _effective_settings(loaded, entry_spec, f"{key}[{index}].")
        return
    yield EffectiveSetting(
        key=key,
        value=shown_value(spec, value),
        unit=spec.meta.unit,
        origin=loaded.origins.get(key, DEFAULT_ORIGIN),
        default=spec.default,
        note=loaded.notes.get(key, UNUSED_NOTE if spec.meta.unused else ""),
        help=spec.meta.help,
    )
