"""Keys of settings as people write them: other spellings, environment names, the nearest known."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import SettingSpec, iter_setting_specs
from dynamo.core.settings.schema import SECTION_ALIASES, Settings

ENVIRONMENT_PREFIX = "DYNAMO_"


SettingsSchema = type[msgspec.Struct]


@cache
def setting_specs_by_key(schema: SettingsSchema = Settings) -> Mapping[str, SettingSpec]:
    """Every setting by its dotted key."""
    return {declared.key: declared for declared in iter_setting_specs(schema)}


@cache
def canonical_keys(schema: SettingsSchema = Settings) -> Mapping[str, str]:
    """Every accepted dotted key -> the setting's own key."""
    found = {key: key for key in setting_specs_by_key(schema)}
    for key, declared in setting_specs_by_key(schema).items():
        section = key.rpartition(".")[0]
        for alias in declared.meta.aliases:
            whole = (
                alias if "." in alias[1:] and alias[0] != "." else f"{section}.{alias.lstrip('.')}"
            )
            found.setdefault(whole.lstrip("."), key)
    return {**found, **_section_aliases(found)}


def _section_aliases(found: Mapping[str, str]) -> Mapping[str, str]:
    return {
        f"{also}{key.removeprefix(section)}": own
        for also, section in SECTION_ALIASES.items()
        for key, own in found.items()
        if key.startswith(f"{section}.")
    }


@cache
def section_descriptions(schema: SettingsSchema = Settings) -> Mapping[str, str]:
    """Every section's name -> its description."""
    hints = {field.name: field.type for field in msgspec.structs.fields(schema)}
    return {
        name: (kind.__doc__ or "").strip()
        for name, kind in hints.items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }


def find_setting(key: str, where: str, schema: SettingsSchema = Settings) -> SettingSpec:
    """The setting that `key` spells. Raises `ConfigError` that names the nearest one."""
    own = canonical_keys(schema).get(key.replace("-", "_"))
    if own is None:
        hint = nearest_key_hint(key, schema)
        raise ConfigError(f"unknown setting {key!r} ({where})", hint=hint, param=key)
    return setting_specs_by_key(schema)[own]


def is_section(key: str, schema: SettingsSchema = Settings) -> bool:
    """Does `key` stand above settings?"""
    prefix = key.replace("-", "_") + "."
    return any(known.startswith(prefix) for known in canonical_keys(schema))


def nearest_key_hint(key: str, schema: SettingsSchema = Settings) -> str:
    """A hint that names the known key nearest to `key`."""
    known = list(canonical_keys(schema))
    every = known if "." in key else [*section_descriptions(schema), *known]
    near = difflib.get_close_matches(key, every, n=1, cutoff=0.6)
    if not near:
        section, _, last = key.rpartition(".")
        inside = [one for one in known if one.rpartition(".")[0] == section]
        tails = {one.rpartition(".")[2]: one for one in inside or known}
        near = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1)]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"sections: {', '.join(section_descriptions(schema)) or ', '.join(known)}"


def environment_name(key: str) -> str:
    """`server.http_port` -> `DYNAMO_SERVER__HTTP_PORT`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()
