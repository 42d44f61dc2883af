"""Loading of settings from all sources. Precedence: flag, environment, file, default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.redaction import REDACTED
from dynamo.core.settings.consistency import check_consistency
from dynamo.core.settings.declare import SettingSpec
from dynamo.core.settings.document import ConfigDocument, parse_config_document
from dynamo.core.settings.keys import (
    ENVIRONMENT_PREFIX,
    SettingsSchema,
    environment_name,
    find_setting,
    setting_specs_by_key,
)
from dynamo.core.settings.schema import Settings
from dynamo.core.settings.schema_cluster import WorkersSettings
from dynamo.core.settings.schema_models import ModelEntrySettings, ModelSettings
from dynamo.core.settings.secret_files import (
    ReadSecretFile,
    load_secret_files,
    refuse_secret_files,
    remember_settings,
)
from dynamo.core.settings.values import SourcedValue, parse_value, shown_value
from dynamo.core.settings.worker_counts import (
    WORKER_COUNTS,
    WORKERS_KEY,
    use_strongest_worker_counts,
    workers_beside_groups,
)

ENVIRONMENT_ALIASES = {
    "DYNAMO_LOG": "logging.level",
    "RUST_LOG": "logging.level",
    "DYNAMO_ETCD_ENDPOINTS": "discovery.etcd.endpoints",
    "DYNAMO_NATS_URL": "messaging.nats.servers",
}
"""Short environment names -> dotted keys. The first name that is set wins."""

DEFAULT_ORIGIN = "default"
UNUSED_NOTE = "not in use yet"
SUBSTITUTE_NOTE = "stands in"
FRONTEND_REPLICAS_KEY = "frontend.replicas"
HTTP_WORKERS_KEY = "server.http_workers"
MODELS_KEY = "models"


last_origins: dict[str, str] = {}
"""The origins of the settings that this process resolved last, by key, without defaults."""


class LoadedSettings(msgspec.Struct, frozen=True):
    """The settings, or a section, with value, origin and notes by key (`decode_workers[0].name`).

    `values` contains every accepted setting, also those without a field in `Settings`. `notes` name
    values that are not in use. `services` holds the options of each service.
    """

    settings: Settings
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: Mapping[str, str]
    services: Mapping[str, Mapping[str, SourcedValue]] = {}


def resolve_settings(
    flags: Mapping[str, SourcedValue] | None = None,
    environ: Mapping[str, str] | None = None,
    document: tuple[str, str] | None = None,
    read_secret_file: ReadSecretFile = refuse_secret_files,
) -> LoadedSettings:
    """Merge `flags` (by dotted key), `environ` and `document` (text, name).

    `read_secret_file` reads the files that settings like `security.secret_file` name. Raises
    `ConfigError` that names the setting, its origin and the accepted values.
    """
    parsed = parse_config_document(*document) if document else ConfigDocument({}, {})
    layers: Sequence[Mapping[str, SourcedValue]] = [
        _use_name_as_path(layer)
        for layer in (flags or {}, read_environment(environ or {}), parsed.settings)
    ]
    layers, secret_notes = load_secret_files(layers, read_secret_file)
    derived, replica_notes = _replicas_as_http_workers(layers)
    layers, count_notes = use_strongest_worker_counts(layers)
    merged = merge_layers([*layers, derived, workers_beside_groups(layers)], Settings)
    merged = _with_models(merged, layers, read_secret_file)
    for model in merged.settings.each_model:
        remember_settings(model)
        check_consistency(model, merged.origins)
    last_origins.clear()
    last_origins.update(
        {key: each for key, each in merged.origins.items() if each != DEFAULT_ORIGIN}
    )
    notes = {**merged.notes, **secret_notes, **replica_notes, **count_notes}
    return replace(merged, notes=notes, services=parsed.services)


def _with_models(
    loaded: LoadedSettings,
    layers: Sequence[Mapping[str, SourcedValue]],
    read_secret_file: ReadSecretFile,
) -> LoadedSettings:
    """Return the settings with what the entries of `models` leave out. Raises `ConfigError`."""
    source = next((layer[MODELS_KEY] for layer in layers if MODELS_KEY in layer), None)
    if source is None or not loaded.settings.models:
        return loaded
    for key in ("model.path", "model.names"):
        if loaded.origins[key] != DEFAULT_ORIGIN:
            raise ConfigError(
                f"{key} ({loaded.origins[key]}) and models ({source.origin}) both name models",
                hint=f"put {key} into an entry of models",
                param=key,
            )
    spec = setting_specs_by_key()[MODELS_KEY]
    models, values, origins = [], dict(loaded.values), dict(loaded.origins)
    for index, written in enumerate(_parse_entries(spec, ModelEntrySettings, source)):
        (entry,), _ = load_secret_files([written], read_secret_file)
        model = with_model_entry(loaded.settings, entry, index)
        models.append(model)
        for key in setting_specs_by_key(ModelEntrySettings):
            if key not in entry and key in values:
                full_key = f"{MODELS_KEY}[{index}].{key}"
                values[full_key], origins[full_key] = values[key], origins[key]
    settings = replace(loaded.settings, models=tuple(map(model_entry, models)))
    return replace(
        loaded, settings=settings, values=values | {MODELS_KEY: settings.models}, origins=origins
    )


def with_model_entry(
    settings: Settings, entry: Mapping[str, SourcedValue], index: int = 0
) -> Settings:
    """Return the settings of the workers of an entry of `models`: those that it gives, else those
    of the sections. Raises `ConfigError`."""
    prefix = f"{MODELS_KEY}[{index}]."
    own: Any = merge_layers([entry], ModelEntrySettings, prefix).settings
    model = ModelSettings(*(getattr(own, name) for name in ModelSettings.__struct_fields__))
    model_settings = replace(settings, model=model, models=())
    if any(key in entry for key in (WORKERS_KEY, *WORKER_COUNTS)):
        workers = 0 if own.prefill_workers or own.decode_workers else 1
        model_settings = replace(
            model_settings,
            engine=replace(model_settings.engine, workers=workers),
            workers=WorkersSettings(),
            prefill_workers=own.prefill_workers,
            decode_workers=own.decode_workers,
        )
    for section in ("engine", "cache"):
        keys = [key for key in entry if key.partition(".")[0] == section]
        names = [key.partition(".")[2] for key in keys if not key.endswith("_file")]
        changes = {name: getattr(getattr(own, section), name) for name in names}
        changed = replace(getattr(model_settings, section), **changes)
        model_settings = replace(model_settings, **{section: changed})
    return model_settings


def model_entry(model: Settings) -> ModelEntrySettings:
    """Return the entry of `models` that has the settings of a model's workers."""
    groups = [
        [group] if group.replicas else [] for group in (model.workers.prefill, model.workers.decode)
    ]
    own = {name: getattr(model.model, name) for name in ModelSettings.__struct_fields__}
    return ModelEntrySettings(
        **own,
        engine=model.engine,
        cache=model.cache,
        prefill_workers=(*groups[0], *model.prefill_workers),
        decode_workers=(*groups[1], *model.decode_workers),
    )


def read_environment(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read `DYNAMO_SECTION__KEY` names and the short names. Raises `ConfigError`."""
    values: dict[str, SourcedValue] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            origin = f"environment {name}"
            key = name.removeprefix(ENVIRONMENT_PREFIX).replace("__", ".").lower()
            try:
                spec = find_setting(key, origin)
            except ConfigError as error:
                hint = error.hint.replace(key, environment_name(key))
                raise ConfigError(error.message, hint=_with_environment_names(hint)) from None
            values[spec.key] = SourcedValue(text, origin, key)
    for name, key in ENVIRONMENT_ALIASES.items():
        if environ.get(name):
            values.setdefault(key, SourcedValue(environ[name], f"environment {name}"))
    return values


def merge_layers(
    layers: Sequence[Mapping[str, SourcedValue]], schema: SettingsSchema, prefix: str = ""
) -> LoadedSettings:
    """Merge `layers`, the strongest first, to the section `schema` with the dotted key `prefix`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: dict[str, str] = {}
    for key, spec in setting_specs_by_key(schema).items():
        full_key = f"{prefix}{key}"
        source = next((layer[key] for layer in layers if key in layer), None)
        if source is None:
            values[full_key], origins[full_key] = spec.default, DEFAULT_ORIGIN
            continue
        origins[full_key] = source.origin
        if spec.entry_schema is None:
            value = _checked_value(spec, source)
        else:
            entries = [
                merge_layers([entry], spec.entry_schema, f"{full_key}[{index}].")
                for index, entry in enumerate(_parse_entries(spec, spec.entry_schema, source))
            ]
            value = tuple(entry.settings for entry in entries)
            for entry in entries:
                values |= entry.values
                origins |= entry.origins
                notes |= entry.notes
        if note := _usage_note(spec, value):
            notes[full_key] = note
            value = dict(spec.meta.not_yet).get(value) or value
        values[full_key] = value
    return LoadedSettings(_build_struct(schema, prefix, values), values, origins, notes)


def _checked_value(spec: SettingSpec, source: SourcedValue) -> Any:
    try:
        return parse_value(spec, source.raw)
    except ValueError as error:
        shown = REDACTED if spec.meta.secret else repr(shown_value(spec, source.raw))
        raise ConfigError(
            f"{spec.key} = {shown} ({source.origin}): {error}", hint=spec.meta.help, param=spec.key
        ) from None


def _usage_note(spec: SettingSpec, value: Any) -> str:
    if spec.meta.unused:
        return UNUSED_NOTE if value != spec.default else ""
    substitutes = dict(spec.meta.not_yet)
    if not isinstance(value, str) or value not in substitutes:
        return ""
    substitute = substitutes[value]
    return f"{value}: {UNUSED_NOTE}; " + (
        f"{substitute} {SUBSTITUTE_NOTE}" if substitute else "a start refuses it"
    )


def _parse_entries(
    spec: SettingSpec, schema: SettingsSchema, source: SourcedValue
) -> Sequence[Mapping[str, SourcedValue]]:
    """Return the settings of each entry. A text is JSON. Raises `ConfigError`."""
    raw = source.raw
    if isinstance(raw, str) and raw.strip():
        parsed = parse_config_document(f"{spec.key}: {raw}", source.origin)
        raw = parsed.settings[spec.key].raw
    if raw in (None, ""):
        return ()
    if not isinstance(raw, list):
        raise ConfigError(
            f"{spec.key} ({source.origin}): wanted a list of sections",
            hint=f"each begins with `- `; known: {', '.join(setting_specs_by_key(schema))}",
        )
    return raw


def _use_name_as_path(layer: Mapping[str, SourcedValue]) -> Mapping[str, SourcedValue]:
    """Treat `model.name` as the model to load if its source gives no path."""
    name = layer.get("model.names")
    if name is None or name.written_key != "model.name" or "model.path" in layer:
        return layer
    rest = {key: source for key, source in layer.items() if key != "model.names"}
    return rest | {"model.path": name}


def _replicas_as_http_workers(
    layers: Sequence[Mapping[str, SourcedValue]],
) -> tuple[Mapping[str, SourcedValue], Mapping[str, str]]:
    """Derive `server.http_workers` from `frontend.replicas` unless it is set. Adds a note."""
    replicas = next(
        (layer[FRONTEND_REPLICAS_KEY] for layer in layers if FRONTEND_REPLICAS_KEY in layer), None
    )
    if replicas is None:
        return {}, {}
    if any(HTTP_WORKERS_KEY in layer for layer in layers):
        return {}, {FRONTEND_REPLICAS_KEY: f"{HTTP_WORKERS_KEY} is given and holds"}
    derived = SourcedValue(replicas.raw, f"{FRONTEND_REPLICAS_KEY}, {replicas.origin}")
    note = f"number of processes that share the port: {HTTP_WORKERS_KEY}"
    return {HTTP_WORKERS_KEY: derived}, {FRONTEND_REPLICAS_KEY: note}


def _build_struct(schema: type[Any], prefix: str, values: Mapping[str, Any]) -> Any:
    parts = {}
    for field in msgspec.structs.fields(schema):
        key = f"{prefix}{field.name}"
        parts[field.name] = (
            values[key] if key in values else _build_struct(field.type, f"{key}.", values)
        )
    return schema(**parts)


def _with_environment_names(hint: str) -> str:
    for key in setting_specs_by_key():
        hint = hint.replace(f"'{key}'", environment_name(key))
    return hint
