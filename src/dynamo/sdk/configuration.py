"""Configuration of services: the section of the file and options, converted to declared types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint
from dynamo.sdk.decorators import spec_of

SERVICE_ARGS_KEY = "ServiceArgs"
CONFIG_ATTRIBUTE = "config"


class ServiceArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for running a service, apart from its own configuration."""

    workers: int | None = None
    resources: dict[str, Any] | None = None


def build_config(service: type[Any], section: Mapping[str, Any]) -> Any:
    """Return the value of the service's `config`, of its annotated type or a dict.

    Raises `ConfigError` that names a wrong key.
    """
    options = {key: value for key, value in section.items() if key != SERVICE_ARGS_KEY}
    kind = config_type(service)
    if kind is None:
        return options
    name = spec_of(service).name
    if issubclass(kind, msgspec.Struct):
        _check_keys(kind, options, name)
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"configuration of {name}: {error}", hint=f"its type is {kind.__qualname__}"
        ) from None


def parse_service_args(service: type[Any], section: Mapping[str, Any]) -> ServiceArgs:
    """Return the replicas and resources of the section. Raises `ConfigError`."""
    options = section.get(SERVICE_ARGS_KEY) or {}
    name = spec_of(service).name
    _check_keys(ServiceArgs, options, f"{name}.{SERVICE_ARGS_KEY}")
    try:
        args = msgspec.convert(options, ServiceArgs, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ConfigError(f"{name}.{SERVICE_ARGS_KEY}{path.rstrip('`')}: {message}") from None
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"{name}.{SERVICE_ARGS_KEY}.workers = {args.workers}: at least 1")
    return args


def config_type(service: type[Any]) -> type[Any] | None:
    """Return the annotated type of `config`; None without annotation, or for dict."""
    if not any(CONFIG_ATTRIBUTE in vars(cls).get("__annotations__", {}) for cls in service.__mro__):
        return None
    try:
        kind = get_type_hints(service)[CONFIG_ATTRIBUTE]
    except NameError as error:
        raise ConfigError(
            f"{service.__name__}.{CONFIG_ATTRIBUTE}: {error}", hint="its type must be importable"
        ) from None
    return kind if isinstance(kind, type) and kind is not dict else None


def qualify_key(service: type[Any], key: str) -> str:
    """Put `ServiceArgs.` before `workers` and `resources`, unless the service has such keys."""
    kind = config_type(service)
    fields = kind.__struct_fields__ if kind and issubclass(kind, msgspec.Struct) else ()
    head = key.partition(".")[0]
    if head in ServiceArgs.__struct_fields__ and head not in fields:
        return f"{SERVICE_ARGS_KEY}.{key}"
    return key


def _check_keys(kind: type[msgspec.Struct], options: Mapping[str, Any], path: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in options.items():
        if key not in fields:
            raise ConfigError(f"{path}: unknown key {key!r}", hint=nearest_name_hint(key, fields))
        inner = fields[key]
        is_section = isinstance(value, dict) and isinstance(inner, type)
        if is_section and issubclass(inner, msgspec.Struct):
            _check_keys(inner, value, f"{path}.{key}")
