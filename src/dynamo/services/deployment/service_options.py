"""Options of single services, from sections of the settings file and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.core.settings import LoadedSettings, SourcedValue
from dynamo.core.settings.keys import canonical_keys
from dynamo.sdk.configuration import SERVICE_ARGS_KEY, qualify_key
from dynamo.sdk.decorators import role_of

ServiceOptions = Mapping[str, Mapping[str, SourcedValue]]
"""Values by service name and dotted key."""
LoadSettings = Callable[[Mapping[str, SourcedValue]], LoadedSettings]
"""Resolves all settings again; the values of the mapping override all other sources."""

SECTIONS_BY_ROLE = {
    "frontend": ("server",),
    "processor": ("sampling", "server"),
    "router": ("router",),
    "worker": ("engine", "model"),
}
"""The sections of settings that hold the options of a ready-made service, by role."""
ORIGINS_ABOVE_FILE = ("flag", "environment", "argument")
"""Origins that override a settings file, as prefixes of SourcedValue.origin."""


def check_service_names(
    options: ServiceOptions, services: Sequence[type[Any]], ready_made: Sequence[str]
) -> None:
    """Raise `ConfigError` for options of a service that is neither in the graph nor ready-made."""
    known = dict.fromkeys([service.__name__ for service in services] + list(ready_made))
    for name, values in options.items():
        if name not in known:
            origin = next((value.origin for value in values.values()), "file")
            example = f"`{services[-1].__name__}:`, then, indented, `{SERVICE_ARGS_KEY}:`"
            hint = f"write it below a service's name: {example}"
            if name != SERVICE_ARGS_KEY:
                hint = nearest_name_hint(name, known)
            raise ConfigError(f"this graph has no service {name!r} ({origin})", hint=hint)


def user_service_section(
    service: type[Any], file: ServiceOptions, flags: ServiceOptions
) -> dict[str, Any]:
    """Return the section of a user's service as nested mappings; flags override the file."""
    section: dict[str, Any] = {}
    for key, value in sorted(file.get(service.__name__, {}).items()):
        path = qualify_key(service, key).split(".") if "." not in key else [key]
        _set_nested(section, path, value.raw)
    for key, value in flags.get(service.__name__, {}).items():
        _set_nested(section, qualify_key(service, key).split("."), _parse_json_value(value.raw))
    return section


def ready_made_settings(
    services: Sequence[type[Any]], base: LoadedSettings, flags: ServiceOptions
) -> dict[str, SourcedValue]:
    """Return the settings that the options of ready-made services set.

    A flag overrides all sources; a service's section overrides only the rest of the file. Raises
    `ConfigError`.
    """
    settings: dict[str, SourcedValue] = {}
    for service in services:
        name = service.__name__
        for key, value in _flatten(base.services.get(name, {})).items():
            setting = _setting_name(service, key, value.origin)
            if setting and not base.origins[setting].startswith(ORIGINS_ABOVE_FILE):
                settings[setting] = value
        for key, value in _flatten(flags.get(name, {})).items():
            if setting := _setting_name(service, key, value.origin):
                settings[setting] = value
    return settings


def _setting_name(service: type[Any], key: str, origin: str) -> str:
    """Return the setting of a ready-made service's option; "" for `resources`. Raises
    `ConfigError` with the nearest option as hint."""
    key = key.removeprefix(f"{SERVICE_ARGS_KEY}.").replace("-", "_")
    if key.partition(".")[0] == "resources":
        return ""
    sections = SECTIONS_BY_ROLE[role_of(service)]
    known = canonical_keys()
    for name in (key, *(f"{section}.{key}" for section in sections)):
        if name in known:
            return known[name]
    parts = [name.partition(".") for name in known]
    options = [option for section, dot, option in parts if dot and section in sections]
    hint = nearest_name_hint(key, options)
    raise ConfigError(f"{service.__name__} has no option {key!r} ({origin})", hint=hint, param=key)


def _flatten(values: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return nested mappings as dotted keys."""
    flat: dict[str, SourcedValue] = {}
    for key, value in values.items():
        if isinstance(value.raw, Mapping):
            inner = {str(name): SourcedValue(raw, value.origin) for name, raw in value.raw.items()}
            flat |= {f"{key}.{name}": nested for name, nested in _flatten(inner).items()}
        else:
            flat[key] = value
    return flat


def _set_nested(section: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = section.get(name)
        section[name] = section = dict(inner) if isinstance(inner, dict) else {}
    section[last] = value


def _parse_json_value(raw: Any) -> Any:
    """Decode a command-line value that is a JSON list or object. Other values stay as they are."""
    if isinstance(raw, str) and raw[:1] in {"[", "{"}:
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw
    return raw
