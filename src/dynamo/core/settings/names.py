"""Keys of settings as people write them: other spellings, environment names, the nearest known."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import Declared, settings_of
from dynamo.core.settings.schema import Settings

ENVIRONMENT = "DYNAMO_"


@cache
def declared_settings() -> Mapping[str, Declared]:
    """Every setting by its dotted key."""
    return {declared.key: declared for declared in settings_of(Settings)}


@cache
def spellings() -> Mapping[str, str]:
    """Every accepted dotted key -> the setting's own key."""
    found = {key: key for key in declared_settings()}
    for key, declared in declared_settings().items():
        section = key.rpartition(".")[0]
        for alias in declared.about.aliases:
            found.setdefault(alias if "." in alias else f"{section}.{alias}", key)
    return found


@cache
def sections() -> Mapping[str, str]:
    """Every section's name -> its description."""
    hints = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    return {
        name: (kind.__doc__ or "").strip()
        for name, kind in hints.items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }


def find(key: str, where: str) -> Declared:
    """The setting that `key` spells. Raises `ConfigError` that names the nearest one."""
    own = spellings().get(key.replace("-", "_"))
    if own is None:
        raise ConfigError(f"unknown setting {key!r} ({where})", hint=nearest(key), param=key)
    return declared_settings()[own]


def nearest(key: str) -> str:
    """A hint that names the known key nearest to `key`."""
    known = list(spellings()) if "." in key else [*sections(), *spellings()]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        section, _, last = key.rpartition(".")
        inside = [one for one in known if one.rpartition(".")[0] == section]
        tails = {one.rpartition(".")[2]: one for one in inside or known}
        near = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1)]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"sections: {', '.join(sections())}"


def environment_name(key: str) -> str:
    """`server.http_port` -> `DYNAMO_SERVER__HTTP_PORT`."""
    return ENVIRONMENT + key.replace(".", "__").upper()
