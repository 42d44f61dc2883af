"""What a file's sections and the command line say about single services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Given, Loaded
from dynamo.core.settings.names import spellings
from dynamo.sdk.configuration import ARGS, full_key
from dynamo.sdk.declare import near, role_of

Options = Mapping[str, Mapping[str, Given]]
"""By service, by dotted key."""
Load = Callable[[Mapping[str, Given]], Loaded]
"""All settings anew, with those of this mapping above whatever else gives them."""

SECTIONS = {
    "frontend": ("server",),
    "processor": ("sampling", "server"),
    "router": ("router",),
    "worker": ("engine", "model"),
}
"""Where an option of a ready-made service is looked for, by role."""
STRONGER = ("flag", "environment", "argument")
"""How the origins of values begin that beat a file."""


def check_names(options: Options, services: Sequence[type[Any]], ready: Sequence[str]) -> None:
    """Raises `ConfigError` for options of a service that is not in the graph, nor ready-made."""
    known = dict.fromkeys([one.__name__ for one in services] + list(ready))
    for name, given in options.items():
        if name not in known:
            where = next((one.where for one in given.values()), "file")
            own = services[-1].__name__
            below = f"write it below a service's name: `{own}:`, then, indented, `{ARGS}:`"
            raise ConfigError(
                f"no service of this graph is called {name!r} ({where})",
                hint=below if name == ARGS else near(name, known),
            )


def section_of(service: type[Any], file: Options, flags: Options) -> dict[str, Any]:
    """The section of a user's service, flags over file; a dotted key is a nested one."""
    section: dict[str, Any] = {}
    for key, one in sorted(file.get(service.__name__, {}).items()):
        path = full_key(service, key).split(".") if "." not in key else [key]
        _put(section, path, one.raw)
    for key, one in flags.get(service.__name__, {}).items():
        _put(section, full_key(service, key).split("."), _plain(one.raw))
    return section


def settings_of(services: Sequence[type[Any]], base: Loaded, flags: Options) -> dict[str, Given]:
    """The settings that the options of ready-made services stand for. A flag beats everything; a
    file's section beats the rest of the file only. Raises `ConfigError`."""
    found: dict[str, Given] = {}
    for service in services:
        name = service.__name__
        for key, one in _flat(base.services.get(name, {})).items():
            own = _setting(service, key, one.where)
            if own and not base.origins[own].startswith(STRONGER):
                found[own] = one
        for key, one in _flat(flags.get(name, {})).items():
            if own := _setting(service, key, one.where):
                found[own] = one
    return found


def _setting(service: type[Any], key: str, where: str) -> str:
    """The setting that an option of a ready-made service is; "" for what is no setting. Raises
    `ConfigError` that names the nearest."""
    key = key.removeprefix(f"{ARGS}.").replace("-", "_")
    if key.partition(".")[0] == "resources":
        return ""
    sections = SECTIONS[role_of(service)]
    known = spellings()
    for spelled in (key, *(f"{section}.{key}" for section in sections)):
        if spelled in known:
            return known[spelled]
    inside = [
        one.partition(".")[2] for one in known if one.partition(".")[0] in sections and "." in one
    ]
    raise ConfigError(
        f"{service.__name__} has no option {key!r} ({where})", hint=near(key, inside), param=key
    )


def _flat(given: Mapping[str, Given]) -> dict[str, Given]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Given] = {}
    for key, one in given.items():
        if isinstance(one.raw, Mapping):
            inner = {str(name): Given(value, one.where) for name, value in one.raw.items()}
            flat |= {f"{key}.{name}": value for name, value in _flat(inner).items()}
        else:
            flat[key] = one
    return flat


def _put(section: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inner = section.get(name)
        section[name] = section = dict(inner) if isinstance(inner, dict) else {}
    section[last] = value


def _plain(raw: Any) -> Any:
    """A text of the command line that is a JSON list or object, as that."""
    if isinstance(raw, str) and raw[:1] in {"[", "{"}:
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return raw
    return raw
