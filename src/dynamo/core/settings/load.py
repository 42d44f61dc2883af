"""Settings out of all that may give them: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.document import ConfigDocument, parse_config_document
from dynamo.core.settings.keys import (
    ENVIRONMENT_PREFIX,
    environment_name,
    find_setting,
    setting_specs_by_key,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings
from dynamo.core.settings.values import SourcedValue, parse_value


def check_consistency(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raises `ConfigError` for settings that cannot hold together."""
    owners: dict[tuple[str, int], str] = {}
    for key, group in _worker_groups(settings):
        for device in dict.fromkeys(group.device_ids):
            before = owners.setdefault((group.host, device), key)
            if before != key:
                where = f"{before} ({origins[f'{before}.device_ids']})"
                raise ConfigError(
                    f"device {device} is given to {where} and "
                    f"to {key} ({origins[f'{key}.device_ids']})",
                    hint="give each its own devices; groups on different hosts say `host:`",
                    param=f"{key}.device_ids",
                )


def _worker_groups(settings: Settings) -> Iterator[tuple[str, WorkerGroupSettings]]:
    yield "workers.prefill", settings.workers.prefill
    yield "workers.decode", settings.workers.decode
    for key in ("prefill_workers", "decode_workers"):
        for at, group in enumerate(getattr(settings, key)):
            yield f"{key}[{at}]", group


ENVIRONMENT_ALIASES = {
    "DYNAMO_LOG": "logging.level",
    "RUST_LOG": "logging.level",
    "DYNAMO_ETCD_ENDPOINTS": "discovery.etcd.endpoints",
    "DYNAMO_NATS_URL": "messaging.nats.servers",
}
"""Environment names of their own, the stronger one first."""

DEFAULT_ORIGIN = "default"
UNUSED_NOTE = "not in use yet"
SUBSTITUTE_NOTE = "stands in"
FRONTEND_REPLICAS_KEY = "frontend.replicas"
HTTP_WORKERS_KEY = "server.http_workers"
S = TypeVar("S", bound=msgspec.Struct)


class MergedSection(msgspec.Struct, Generic[S], frozen=True):
    """A section with all below it; by dotted key (`decode_workers[0].name`) where each value came
    from, and what there is to say about a value."""

    value: S
    origins: Mapping[str, str]
    notes: Mapping[str, str]


class LoadedSettings(msgspec.Struct, frozen=True):
    """The settings; by dotted key (`decode_workers[0].name`) where each value came from, and what
    is not in use of what was given; the options of services, by service."""

    settings: Settings
    origins: Mapping[str, str]
    notes: Mapping[str, str]
    services: Mapping[str, Mapping[str, SourcedValue]]


def resolve_settings(
    flags: Mapping[str, SourcedValue] | None = None,
    environ: Mapping[str, str] | None = None,
    document: tuple[str, str] | None = None,
) -> LoadedSettings:
    """Merge `flags` (by dotted key), `environ` and `document` (text, name).

    Raises `ConfigError` that names the setting, where its value came from and what was wanted.
    """
    read = parse_config_document(*document) if document else ConfigDocument({}, {})
    layers = [
        _use_name_as_path(one)
        for one in (flags or {}, read_environment(environ or {}), read.settings)
    ]
    stand_ins, notes = _replicas_as_http_workers(layers)
    found = merge_layers([*layers, stand_ins], Settings)
    check_consistency(found.value, found.origins)
    return LoadedSettings(found.value, found.origins, {**found.notes, **notes}, read.services)


def read_environment(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """`DYNAMO_SECTION__KEY` of every setting, and the short names. Raises `ConfigError`."""
    found: dict[str, SourcedValue] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            where = f"environment {name}"
            key = name.removeprefix(ENVIRONMENT_PREFIX).replace("__", ".").lower()
            try:
                declared = find_setting(key, where)
            except ConfigError as error:
                near = error.hint.replace(key, environment_name(key))
                raise ConfigError(error.message, hint=_with_environment_names(near)) from None
            found[declared.key] = SourcedValue(text, where, key)
    for name, key in ENVIRONMENT_ALIASES.items():
        if environ.get(name):
            found.setdefault(key, SourcedValue(environ[name], f"environment {name}"))
    return found


def merge_layers(
    layers: Sequence[Mapping[str, SourcedValue]], schema: type[S], prefix: str = ""
) -> MergedSection[S]:
    """The strongest layer first; what none gives keeps its default. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: dict[str, str] = {}
    for key, declared in setting_specs_by_key(schema).items():
        given = next((layer[key] for layer in layers if key in layer), None)
        shown = f"{prefix}{key}"
        origins[shown] = given.origin if given else DEFAULT_ORIGIN
        if given is None:
            values[key] = declared.default
        elif declared.entry_schema is not None:
            entries = [
                merge_layers([entry], declared.entry_schema, f"{shown}[{at}].")
                for at, entry in enumerate(_parse_entries(declared, declared.entry_schema, given))
            ]
            values[key] = tuple(entry.value for entry in entries)
            for entry in entries:
                origins |= entry.origins
                notes |= entry.notes
        else:
            values[key] = _checked_value(declared, given)
        if given is not None and (note := _usage_note(declared, values[key])):
            notes[shown] = note
            values[key] = dict(declared.meta.not_yet).get(values[key]) or values[key]
    return MergedSection(_build_struct(schema, "", values), origins, notes)


def _checked_value(declared: SettingSpec, given: SourcedValue) -> Any:
    try:
        return parse_value(declared, given.raw)
    except ValueError as wanted:
        shown = "***" if declared.meta.secret else repr(given.raw)
        raise ConfigError(
            f"{declared.key} = {shown} ({given.origin}): {wanted}",
            hint=declared.meta.help,
            param=declared.key,
        ) from None


def _usage_note(declared: SettingSpec, value: Any) -> str:
    if declared.meta.unused:
        return UNUSED_NOTE if value != declared.default else ""
    later = dict(declared.meta.not_yet) if isinstance(value, str) else {}
    if value not in later:
        return ""
    stand_in = later[value]
    return f"{value}: {UNUSED_NOTE}; " + (
        f"{stand_in} {SUBSTITUTE_NOTE}" if stand_in else "a start refuses it"
    )


def _parse_entries(
    declared: SettingSpec, schema: type[msgspec.Struct], given: SourcedValue
) -> Sequence[Mapping[str, SourcedValue]]:
    """Each entry's settings; a text is JSON. Raises `ConfigError`."""
    raw = given.raw
    if isinstance(raw, str) and raw.strip():
        read = parse_config_document(f"{declared.key}: {raw}", given.origin)
        raw = read.settings[declared.key].raw
    if raw in (None, ""):
        return ()
    if not isinstance(raw, list):
        raise ConfigError(
            f"{declared.key} ({given.origin}): wanted a list of sections",
            hint=f"each begins with `- `; known: {', '.join(setting_specs_by_key(schema))}",
        )
    return raw


def _use_name_as_path(layer: Mapping[str, SourcedValue]) -> Mapping[str, SourcedValue]:
    """`model.name` without a path beside it says what to load."""
    name = layer.get("model.names")
    if name is None or name.written_key != "model.name" or "model.path" in layer:
        return layer
    rest = {key: given for key, given in layer.items() if key != "model.names"}
    return rest | {"model.path": name}


def _replicas_as_http_workers(
    layers: Sequence[Mapping[str, SourcedValue]],
) -> tuple[Mapping[str, SourcedValue], Mapping[str, str]]:
    """`frontend.replicas` is the number of processes that share the port, where none is given; and
    what there is to say of that."""
    wanted = next(
        (layer[FRONTEND_REPLICAS_KEY] for layer in layers if FRONTEND_REPLICAS_KEY in layer), None
    )
    if wanted is None:
        return {}, {}
    if any(HTTP_WORKERS_KEY in layer for layer in layers):
        return {}, {FRONTEND_REPLICAS_KEY: f"{HTTP_WORKERS_KEY} is given and holds"}
    given = SourcedValue(wanted.raw, f"{FRONTEND_REPLICAS_KEY}, {wanted.origin}")
    return {HTTP_WORKERS_KEY: given}, {
        FRONTEND_REPLICAS_KEY: f"so many processes share the port: {HTTP_WORKERS_KEY}"
    }


def _build_struct(schema: type[Any], prefix: str, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(schema)
    parts = {}
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.name}"
        nested = hints[field.name]
        parts[field.name] = (
            values[key] if key in values else _build_struct(nested, f"{key}.", values)
        )
    return schema(**parts)


def _with_environment_names(hint: str) -> str:
    for key in setting_specs_by_key():
        hint = hint.replace(f"'{key}'", environment_name(key))
    return hint
