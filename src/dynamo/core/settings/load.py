"""Settings out of all that may give them: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.checks import check
from dynamo.core.settings.declare import Declared
from dynamo.core.settings.document import Document, read_document
from dynamo.core.settings.given import Given
from dynamo.core.settings.names import (
    ENVIRONMENT,
    declared_settings,
    environment_name,
    find,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.values import value_of

SHORT_NAMES = {
    "DYNAMO_LOG": "logging.level",
    "RUST_LOG": "logging.level",
    "DYNAMO_ETCD_ENDPOINTS": "discovery.etcd.endpoints",
    "DYNAMO_NATS_URL": "messaging.nats.servers",
}
"""Environment names of their own, the stronger one first."""

DEFAULT = "default"
UNUSED = "not in use yet"
STANDS_IN = "stands in"
REPLICAS = "frontend.replicas"
HTTP_WORKERS = "server.http_workers"
S = TypeVar("S", bound=msgspec.Struct)


class Merged(msgspec.Struct, Generic[S], frozen=True):
    """A section with all below it; by dotted key (`decode_workers[0].name`) where each value came
    from, and what there is to say about a value."""

    value: S
    origins: Mapping[str, str]
    notes: Mapping[str, str]


class Loaded(msgspec.Struct, frozen=True):
    """The settings; by dotted key (`decode_workers[0].name`) where each value came from, and what
    is not in use of what was given; the options of services, by service."""

    settings: Settings
    origins: Mapping[str, str]
    notes: Mapping[str, str]
    services: Mapping[str, Mapping[str, Given]]


def load(
    flags: Mapping[str, Given] | None = None,
    environ: Mapping[str, str] | None = None,
    document: tuple[str, str] | None = None,
) -> Loaded:
    """Merge `flags` (by dotted key), `environ` and `document` (text, name).

    Raises `ConfigError` that names the setting, where its value came from and what was wanted.
    """
    read = read_document(*document) if document else Document({}, {})
    layers = [
        _hub_name(one) for one in (flags or {}, from_environment(environ or {}), read.settings)
    ]
    stand_ins, notes = _frontends(layers)
    found = merge([*layers, stand_ins], Settings)
    check(found.value, found.origins)
    return Loaded(found.value, found.origins, {**found.notes, **notes}, read.services)


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
            found[declared.key] = Given(text, where, key)
    for name, key in SHORT_NAMES.items():
        if environ.get(name):
            found.setdefault(key, Given(environ[name], f"environment {name}"))
    return found


def merge(layers: Sequence[Mapping[str, Given]], schema: type[S], prefix: str = "") -> Merged[S]:
    """The strongest layer first; what none gives keeps its default. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: dict[str, str] = {}
    for key, declared in declared_settings(schema).items():
        given = next((layer[key] for layer in layers if key in layer), None)
        shown = f"{prefix}{key}"
        origins[shown] = given.where if given else DEFAULT
        if given is None:
            values[key] = declared.default
        elif declared.entries is not None:
            entries = [
                merge([entry], declared.entries, f"{shown}[{at}].")
                for at, entry in enumerate(_entries(declared, declared.entries, given))
            ]
            values[key] = tuple(entry.value for entry in entries)
            for entry in entries:
                origins |= entry.origins
                notes |= entry.notes
        else:
            values[key] = _value(declared, given)
        if given is not None and (note := _note(declared, values[key])):
            notes[shown] = note
            values[key] = dict(declared.about.not_yet).get(values[key]) or values[key]
    return Merged(_build(schema, "", values), origins, notes)


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


def _note(declared: Declared, value: Any) -> str:
    if declared.about.unused:
        return UNUSED if value != declared.default else ""
    later = dict(declared.about.not_yet) if isinstance(value, str) else {}
    if value not in later:
        return ""
    stand_in = later[value]
    return f"{value}: {UNUSED}; " + (
        f"{stand_in} {STANDS_IN}" if stand_in else "a start refuses it"
    )


def _entries(
    declared: Declared, schema: type[msgspec.Struct], given: Given
) -> Sequence[Mapping[str, Given]]:
    """Each entry's settings; a text is JSON. Raises `ConfigError`."""
    raw = given.raw
    if isinstance(raw, str) and raw.strip():
        read = read_document(f"{declared.key}: {raw}", given.where)
        raw = read.settings[declared.key].raw
    if raw in (None, ""):
        return ()
    if not isinstance(raw, list):
        raise ConfigError(
            f"{declared.key} ({given.where}): wanted a list of sections",
            hint=f"each begins with `- `; known: {', '.join(declared_settings(schema))}",
        )
    return raw


def _hub_name(layer: Mapping[str, Given]) -> Mapping[str, Given]:
    """`model.name` without a path beside it says what to load."""
    name = layer.get("model.names")
    if name is None or name.spelled != "model.name" or "model.path" in layer:
        return layer
    rest = {key: given for key, given in layer.items() if key != "model.names"}
    return rest | {"model.path": name}


def _frontends(
    layers: Sequence[Mapping[str, Given]],
) -> tuple[Mapping[str, Given], Mapping[str, str]]:
    """`frontend.replicas` is the number of processes that share the port, where none is given; and
    what there is to say of that."""
    wanted = next((layer[REPLICAS] for layer in layers if REPLICAS in layer), None)
    if wanted is None:
        return {}, {}
    if any(HTTP_WORKERS in layer for layer in layers):
        return {}, {REPLICAS: f"{HTTP_WORKERS} is given and holds"}
    given = Given(wanted.raw, f"{REPLICAS}, {wanted.where}")
    return {HTTP_WORKERS: given}, {REPLICAS: f"so many processes share the port: {HTTP_WORKERS}"}


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
