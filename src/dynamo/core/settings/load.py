"""Settings out of all that may give them: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import Declared
from dynamo.core.settings.document import read_document
from dynamo.core.settings.given import Given
from dynamo.core.settings.names import (
    ENVIRONMENT,
    declared_settings,
    environment_name,
    find,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import value_of

SHORT_NAMES = {"DYNAMO_LOG": "logging.level", "RUST_LOG": "logging.level"}
"""Environment names of their own, the stronger one first."""

DEFAULT = "default"


class Loaded(msgspec.Struct, frozen=True):
    """The settings, and by dotted key where each value came from."""

    settings: Settings
    origins: Mapping[str, str]


def load(
    flags: Mapping[str, Given] | None = None,
    environ: Mapping[str, str] | None = None,
    document: tuple[str, str] | None = None,
) -> Loaded:
    """Merge `flags` (by dotted key), `environ` and `document` (text, name).

    Raises `ConfigError` that names the setting, where its value came from and what was wanted.
    """
    layers = [flags or {}, from_environment(environ or {})]
    if document is not None:
        layers.append(read_document(*document))
    return merge(layers)


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """`DYNAMO_SECTION__KEY` of every setting, and the short names. Raises `ConfigError`."""
    found: dict[str, Given] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT) and "__" in name:
            where = f"environment {name}"
            key = name.removeprefix(ENVIRONMENT).replace("__", ".").lower()
            try:
                declared = find(key, where)
            except ConfigError as error:
                near = error.hint.replace(key, environment_name(key))
                raise ConfigError(error.message, hint=_in_environment(near)) from None
            found[declared.key] = Given(text, where)
    for name, key in SHORT_NAMES.items():
        if environ.get(name):
            found.setdefault(key, Given(environ[name], f"environment {name}"))
    return found


def merge(layers: Sequence[Mapping[str, Given]]) -> Loaded:
    """The strongest layer first; what none gives keeps its default."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, declared in declared_settings().items():
        given = next((layer[key] for layer in layers if key in layer), None)
        origins[key] = given.where if given else DEFAULT
        values[key] = _value(declared, given) if given else declared.default
    return Loaded(_build(Settings, "", values), origins)


def _value(declared: Declared, given: Given) -> Any:
    try:
        return value_of(declared, given.raw)
    except ValueError as wanted:
        shown = "***" if declared.about.secret else repr(given.raw)
        raise ConfigError(
            f"{declared.key} = {shown} ({given.where}): {wanted}",
            hint=declared.about.help,
            param=declared.key,
        ) from None


def _build(schema: type[Any], prefix: str, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(schema)
    parts = {}
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.name}"
        nested = hints[field.name]
        parts[field.name] = values[key] if key in values else _build(nested, f"{key}.", values)
    return schema(**parts)


def _in_environment(hint: str) -> str:
    for key in declared_settings():
        hint = hint.replace(f"'{key}'", environment_name(key))
    return hint
