"""Keys of settings as people write them: other spellings, environment names, the nearest known."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import Declared, settings_of
from dynamo.core.settings.schema import SECTION_SPELLINGS, Settings

ENVIRONMENT = "DYNAMO_"


Schema = type[msgspec.Struct]


@cache
def declared_settings(schema: Schema = Settings) -> Mapping[str, Declared]:
    """Every setting by its dotted key."""
    return {declared.key: declared for declared in settings_of(schema)}


@cache
def spellings(schema: Schema = Settings) -> Mapping[str, str]:
    """Every accepted dotted key -> the setting's own key."""
    found = {key: key for key in declared_settings(schema)}
    for key, declared in declared_settings(schema).items():
        section = key.rpartition(".")[0]
        for alias in declared.about.aliases:
            whole = (
                alias if "." in alias[1:] and alias[0] != "." else f"{section}.{alias.lstrip('.')}"
            )
            found.setdefault(whole.lstrip("."), key)
    return {**found, **_in_other_sections(found)}


def _in_other_sections(found: Mapping[str, str]) -> Mapping[str, str]:
    return {
        f"{also}{key.removeprefix(section)}": own
        for also, section in SECTION_SPELLINGS.items()
        for key, own in found.items()
        if key.startswith(f"{section}.")
    }


@cache
def sections(schema: Schema = Settings) -> Mapping[str, str]:
    """Every section's name -> its description."""
    hints = {field.name: field.type for field in msgspec.structs.fields(schema)}
    return {
        name: (kind.__doc__ or "").strip()
        for name, kind in hints.items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }


def find(key: str, where: str, schema: Schema = Settings) -> Declared:
    """The setting that `key` spells. Raises `ConfigError` that names the nearest one."""
    own = spellings(schema).get(key.replace("-", "_"))
    if own is None:
        hint = nearest(key, schema)
        raise ConfigError(f"unknown setting {key!r} ({where})", hint=hint, param=key)
    return declared_settings(schema)[own]


def is_section(key: str, schema: Schema = Settings) -> bool:
    """Does `key` stand above settings?"""
    prefix = key.replace("-", "_") + "."
    return any(known.startswith(prefix) for known in spellings(schema))


def nearest(key: str, schema: Schema = Settings) -> str:
    """A hint that names the known key nearest to `key`."""
    known = list(spellings(schema))
    every = known if "." in key else [*sections(schema), *known]
    near = difflib.get_close_matches(key, every, n=1, cutoff=0.6)
    if not near:
        section, _, last = key.rpartition(".")
        inside = [one for one in known if one.rpartition(".")[0] == section]
        tails = {one.rpartition(".")[2]: one for one in inside or known}
        near = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1)]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"sections: {', '.join(sections(schema)) or ', '.join(known)}"


def environment_name(key: str) -> str:
    """`server.http_port` -> `DYNAMO_SERVER__HTTP_PORT`."""
    return ENVIRONMENT + key.replace(".", "__").upper()
