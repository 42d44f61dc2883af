"""What a file's sections and the command line say about single services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SourcedValue
from dynamo.core.settings.keys import canonical_keys
from dynamo.sdk.configuration import SERVICE_ARGS_KEY, qualify_key
from dynamo.sdk.decorators import nearest_name_hint, role_of

ServiceOptions = Mapping[str, Mapping[str, SourcedValue]]
"""By service, by dotted key."""
LoadSettings = Callable[[Mapping[str, SourcedValue]], LoadedSettings]
"""All settings anew, with those of this mapping above whatever else gives them."""

SECTIONS_BY_ROLE = {
    "frontend": ("server",),
    "processor": ("sampling", "server"),
    "router": ("router",),
    "worker": ("engine", "model"),
}
"""Where an option of a ready-made service is looked for, by role."""
ORIGINS_ABOVE_FILE = ("flag", "environment", "argument")
"""How the origins of values begin that beat a file."""


def check_service_names(
    options: ServiceOptions, services: Sequence[type[Any]], ready: Sequence[str]
) -> None:
    """Raises `ConfigError` for options of a service that is not in the graph, nor ready-made."""
    known = dict.fromkeys([one.__name__ for one in services] + list(ready))
    for name, given in options.items():
        if name not in known:
            where = next((one.origin for one in given.values()), "file")
            own = services[-1].__name__
            below = (
                f"write it below a service's name: `{own}:`, then, indented, `{SERVICE_ARGS_KEY}:`"
            )
            raise ConfigError(
                f"no service of this graph is called {name!r} ({where})",
                hint=below if name == SERVICE_ARGS_KEY else nearest_name_hint(name, known),
            )


def user_service_section(
    service: type[Any], file: ServiceOptions, flags: ServiceOptions
) -> dict[str, Any]:
    """The section of a user's service, flags over file; a dotted key is a nested one."""
    section: dict[str, Any] = {}
    for key, one in sorted(file.get(service.__name__, {}).items()):
        path = qualify_key(service, key).split(".") if "." not in key else [key]
        _set_nested(section, path, one.raw)
    for key, one in flags.get(service.__name__, {}).items():
        _set_nested(section, qualify_key(service, key).split("."), _parse_json_value(one.raw))
    return section


def ready_made_settings(
    services: Sequence[type[Any]], base: LoadedSettings, flags: ServiceOptions
) -> dict[str, SourcedValue]:
    """The settings that the options of ready-made services stand for. A flag beats everything; a
    file's section beats the rest of the file only. Raises `ConfigError`."""
    found: dict[str, SourcedValue] = {}
    for service in services:
        name = service.__name__
        for key, one in _flatten(base.services.get(name, {})).items():
            own = _setting_name(service, key, one.origin)
            if own and not base.origins[own].startswith(ORIGINS_ABOVE_FILE):
                found[own] = one
        for key, one in _flatten(flags.get(name, {})).items():
            if own := _setting_name(service, key, one.origin):
                found[own] = one
    return found


def _setting_name(service: type[Any], key: str, where: str) -> str:
    """The setting that an option of a ready-made service is; "" for what is no setting. Raises
    `ConfigError` that names the nearest."""
    key = key.removeprefix(f"{SERVICE_ARGS_KEY}.").replace("-", "_")
    if key.partition(".")[0] == "resources":
        return ""
    sections = SECTIONS_BY_ROLE[role_of(service)]
    known = canonical_keys()
    for spelled in (key, *(f"{section}.{key}" for section in sections)):
        if spelled in known:
            return known[spelled]
    inside = [
        one.partition(".")[2] for one in known if one.partition(".")[0] in sections and "." in one
    ]
    raise ConfigError(
        f"{service.__name__} has no option {key!r} ({where})",
        hint=nearest_name_hint(key, inside),
        param=key,
    )


def _flatten(given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Nested mappings as dotted keys."""
    flat: dict[str, SourcedValue] = {}
    for key, one in given.items():
        if isinstance(one.raw, Mapping):
            inner = {str(name): SourcedValue(value, one.origin) for name, value in one.raw.items()}
            flat |= {f"{key}.{name}": value for name, value in _flatten(inner).items()}
        else:
            flat[key] = one
    return flat


def _set_nested(section: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = section.get(name)
        section[name] = section = dict(inner) if isinstance(inner, dict) else {}
    section[last] = value


def _parse_json_value(raw: Any) -> Any:
    """A text of the command line that is a JSON list or object, as that."""
    if isinstance(raw, str) and raw[:1] in {"[", "{"}:
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw
    return raw
