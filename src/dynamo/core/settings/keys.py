"""Keys of settings: dotted keys, aliases, environment names and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings.declare import (
    SettingMeta,
    SettingSpec,
    SettingsSection,
    iter_setting_specs,
)
from dynamo.core.settings.schema import SECTION_ALIASES, Settings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings
from dynamo.core.settings.schema_models import MODEL_ENTRY_ALIASES, ModelEntrySettings


def _row(key: str, default: Any, text: str, *, kind: Any = None, **meta: Any) -> SettingSpec:
    return SettingSpec(key, kind or type(default), default, SettingMeta(text, unused=True, **meta))


def _under(section: str, rows: tuple[SettingSpec, ...]) -> Iterator[SettingSpec]:
    for row in rows:
        yield replace(row, key=f"{section}.{row.key}")


_RESOURCES = (
    _row("cpu", 0.0, "processor cores; `500m` = 0.5", unit="cores", ge=0),
    _row("memory", 0, "memory; 0: no limit", unit="bytes", ge=0),
    _row("gpu", 0, "accelerators", ge=0, aliases=(".nvidia.com/gpu",)),
)
_CACHE_POLICY = _row("cache_policy", "lru", "which block is evicted first", choices=("lru",))
_WORKER_GROUP = (
    *_under("resources", _RESOURCES),
    *_under("kv_cache", (_CACHE_POLICY,)),
)

NO_EFFECT: Mapping[type[SettingsSection], tuple[SettingSpec, ...]] = {
    Settings: (
        _row("frontend.router_endpoint", "", "URL of a separate router; empty: in the frontend"),
        *_under("frontend.resources", _RESOURCES),
        *_under("router.resources", _RESOURCES),
        *_under("cache", (_CACHE_POLICY,)),
        *_under("workers.prefill", _WORKER_GROUP),
        *_under("workers.decode", _WORKER_GROUP),
        _row("messaging.nats.cluster_name", "", "name of the NATS cluster"),
        _row("monitoring.grafana.enabled", False, "run a Grafana"),
        _row("monitoring.grafana.port", 3000, "its port", ge=1, le=65535),
    ),
    WorkerGroupSettings: _WORKER_GROUP,
}
"""Settings without effect, by schema: configuration files written for Dynamo contain them. The
loader treats them as all others, and their values are in `LoadedSettings.values` only. A key is
relative to its schema. A setting that gains an effect moves to its section. Fields with
`unused=True` have no effect either; a choice in a field's `not_yet` has none or is refused
(`declare.py`)."""

REMEDIES = {
    "monitoring.grafana.enabled": 'no Grafana is started; the page "watch" of the guide says how '
    "one is, and how yours shows our dashboards",
}
"""Advice that a start gives to users of a setting, by key."""

NO_EFFECT_SECTIONS = {
    "nixl": "Transfer of KV blocks between workers.",
    "resources": "Requests of one replica to its host.",
    "kv_cache": "The KV cache of one group of workers.",
}
"""Descriptions of the sections all of whose settings are in `NO_EFFECT`."""


ENVIRONMENT_PREFIX = "DYNAMO_"

SettingsSchema = type[SettingsSection]


@cache
def setting_specs_by_key(schema: SettingsSchema = Settings) -> Mapping[str, SettingSpec]:
    """Every accepted setting by its dotted key, section by section.

    The settings without effect follow the fields of their section. A secret is followed by the
    setting that names its file.
    """
    specs: list[SettingSpec] = []
    for spec in (*iter_setting_specs(schema), *NO_EFFECT.get(schema, ())):
        specs += [spec, _secret_file_spec(spec)] if spec.meta.secret else [spec]
    sections = list(dict.fromkeys(_first_part(spec.key) for spec in specs))
    specs.sort(key=lambda spec: sections.index(_first_part(spec.key)))
    return {spec.key: spec for spec in specs}


def secret_file_key(key: str) -> str:
    """Return the key of the file that holds a secret: `server.api_keys` -> `...api_keys_file`."""
    return f"{key}_file"


def _secret_file_spec(spec: SettingSpec) -> SettingSpec:
    text = f"file that holds `{spec.key}`, instead of that setting"
    if spec.default == ():
        text += "; one item a line"
    return SettingSpec(secret_file_key(spec.key), str, "", SettingMeta(text))


@cache
def canonical_keys(schema: SettingsSchema = Settings) -> Mapping[str, str]:
    """Every accepted dotted key, aliases included -> the setting's own key."""
    keys = {key: key for key in setting_specs_by_key(schema)}
    for key, spec in setting_specs_by_key(schema).items():
        section = key.rpartition(".")[0]
        for alias in spec.meta.aliases:
            whole = (
                alias if "." in alias[1:] and alias[0] != "." else f"{section}.{alias.lstrip('.')}"
            )
            keys.setdefault(whole.lstrip("."), key)
    short = MODEL_ENTRY_ALIASES if schema is ModelEntrySettings else {}
    return {**keys, **_keys_of_section_aliases(keys), **short}


def _keys_of_section_aliases(keys: Mapping[str, str]) -> Mapping[str, str]:
    return {
        f"{alias}{key.removeprefix(section)}": own_key
        for alias, section in SECTION_ALIASES.items()
        for key, own_key in keys.items()
        if key.startswith(f"{section}.")
    }


@cache
def section_descriptions(schema: SettingsSchema = Settings) -> Mapping[str, str]:
    """The name of every section -> its description."""
    fields = {field.name: field.type for field in msgspec.structs.fields(schema)}
    descriptions = {
        name: (kind.__doc__ or "").strip()
        for name, kind in fields.items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    } | NO_EFFECT_SECTIONS
    first_parts = dict.fromkeys(map(_first_part, setting_specs_by_key(schema)))
    return {name: descriptions[name] for name in first_parts if name in descriptions}


def find_setting(key: str, origin: str, schema: SettingsSchema = Settings) -> SettingSpec:
    """Return the setting that `key` or an alias names. Raises `ConfigError` with a near key."""
    own_key = canonical_keys(schema).get(key.replace("-", "_"))
    if own_key is None:
        hint = nearest_key_hint(key, schema)
        raise ConfigError(f"unknown setting {key!r} ({origin})", hint=hint, param=key)
    return setting_specs_by_key(schema)[own_key]


def is_section(key: str, schema: SettingsSchema = Settings) -> bool:
    """Whether `key` names a section, at any depth."""
    prefix = key.replace("-", "_") + "."
    return any(known.startswith(prefix) for known in canonical_keys(schema))


def nearest_key_hint(key: str, schema: SettingsSchema = Settings) -> str:
    """Return a hint that names the known key nearest to `key`, else the sections."""
    known_keys = list(canonical_keys(schema))
    candidates = known_keys if "." in key else [*section_descriptions(schema), *known_keys]
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6)
    if not near:
        section, _, last = key.rpartition(".")
        same_section = [known for known in known_keys if known.rpartition(".")[0] == section]
        tails = {known.rpartition(".")[2]: known for known in same_section or known_keys}
        near = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1)]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"sections: {', '.join(section_descriptions(schema)) or ', '.join(known_keys)}"


def environment_name(key: str) -> str:
    """`server.http_port` -> `DYNAMO_SERVER__HTTP_PORT`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def _first_part(key: str) -> str:
    return key.partition(".")[0]
