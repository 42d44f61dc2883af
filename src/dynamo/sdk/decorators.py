"""Decorators that declare services. Each only records the declaration in the class."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint

log = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

SPEC_ATTRIBUTE = "__dynamo_service__"
ENDPOINT_ATTRIBUTE = "__dynamo_endpoint__"
HOOK_ATTRIBUTE = "__dynamo_hook__"
ROLE_ATTRIBUTE = "dynamo_role"
"""Class attribute of Dynamo's own services that names their process role."""
DYNAMO_KEYS = ("namespace", "model", "enabled")


class EndpointSpec(msgspec.Struct, frozen=True):
    """An endpoint. `name` is its name on the wire. `streams`: it is an async generator."""

    name: str
    method: str
    streams: bool
    function: Callable[..., Any]


class ServiceSpec(msgspec.Struct):
    """The declaration of a service class. `namespace` "": that of the settings.

    `component` is the name on the wire; a subclass of a built-in service has that service's name.
    `model` is the model name under which HTTP offers the endpoint `chat`; "" = none.
    """

    name: str
    component: str
    namespace: str
    model: str
    workers: int
    resources: Mapping[str, Any]
    endpoints: Mapping[str, EndpointSpec]
    dependencies: Mapping[str, type[Any]]
    start_hooks: tuple[str, ...]
    stop_hooks: tuple[str, ...]
    links: list[type[Any]]


class Dependency:
    """Placeholder in a class for the handle that its instances get."""

    def __init__(self, service: type[Any]) -> None:
        self.service = service
        self._name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        raise ConfigError(
            f"{owner.__name__}.{self._name} is not connected: the service was not started",
            hint="in a test use dynamo.testing.local_graph, or set the attribute to a fake",
        )


def service(
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
    image: str | None = None,
    traffic: Mapping[str, Any] | None = None,
) -> Callable[[C], C]:
    """Declare a class as a service of the same name. Raises `ConfigError`.

    `dynamo` has `namespace` and `model` (see `ServiceSpec`). `workers` is the number of replicas,
    each in its own process. `resources` ("gpu", "cpu", "memory") are the needs of a replica.
    `dynamo["enabled"]`, `image` and `traffic` are those of NVIDIA Dynamo: a service is always
    enabled, and the last two have no effect.
    """
    del image
    if traffic:
        log.warning("@service(traffic=...) has no effect: --request-timeout bounds a request")
    options = _read_options(dynamo or {})
    if workers < 1:
        raise ConfigError(f"service(workers={workers}): at least 1")

    def declare(cls: C) -> C:
        members = inspect.getmembers(cls)
        hooks = [(getattr(value, HOOK_ATTRIBUTE, ""), name) for name, value in members]
        spec = ServiceSpec(
            name=cls.__name__,
            component=builtin_service(cls).__name__,
            namespace=options.get("namespace", ""),
            model=options.get("model", ""),
            workers=workers,
            resources=dict(resources or {}),
            endpoints=_collect_endpoints(cls),
            dependencies={
                name: value.service for name, value in members if isinstance(value, Dependency)
            },
            start_hooks=tuple(name for moment, name in hooks if moment == "start"),
            stop_hooks=tuple(name for moment, name in hooks if moment == "stop"),
            links=[],
        )
        setattr(cls, SPEC_ATTRIBUTE, spec)
        cls.link = classmethod(_link)
        return cls

    return declare


def _read_options(dynamo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known keys. Raises `ConfigError` for others."""
    options = dict(dynamo)
    if options.pop("enabled", True) is not True:
        raise ConfigError(
            "service(dynamo={'enabled': False}): a service that is not distributed does not exist",
            hint="use a plain class, or leave 'enabled' out",
        )
    for key in options.keys() - set(DYNAMO_KEYS):
        raise ConfigError(
            f"service(dynamo=...): unknown key {key!r}", hint=nearest_name_hint(key, DYNAMO_KEYS)
        )
    return options


def dynamo_endpoint(name: str | None = None, *, is_api: bool = False) -> Callable[[F], F]:
    """Declare a method as an endpoint, `name` on the wire. Raises `ConfigError`.

    A coroutine function answers once, an async generator function streams. The method takes `self`
    and at most one request. Annotations may be types that msgspec supports.
    """
    if callable(name):
        raise ConfigError("@dynamo_endpoint needs its parentheses", hint="write @dynamo_endpoint()")
    if is_api:
        raise ConfigError(
            "dynamo_endpoint(is_api=True): endpoints have no HTTP routes of their own",
            hint='name the endpoint "chat" and declare @service(dynamo={"model": NAME}), which '
            "HTTP serves at /v1/chat/completions, or call it with `dynamo call`",
        )

    def mark(function: F) -> F:
        streams = inspect.isasyncgenfunction(function)
        if not streams and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{function.__qualname__} cannot be an endpoint: it is not asynchronous",
                hint="write `async def`; with `yield` inside, it streams",
            )
        if len(inspect.signature(function).parameters) not in {1, 2}:
            raise ConfigError(
                f"{function.__qualname__} must take self and at most one request",
                hint="put what it needs into one dict or msgspec.Struct",
            )
        method = function.__name__
        setattr(
            function, ENDPOINT_ATTRIBUTE, EndpointSpec(name or method, method, streams, function)
        )
        return function

    return mark


def depends(service: type[T]) -> T:
    """Declare a dependency. The attribute becomes a handle, whose methods are the endpoints."""
    spec_of(service)
    return cast("T", Dependency(service))


def on_start(function: F) -> F:
    """Run this method (plain or `async`) before the first call. Dependencies are connected."""
    setattr(function, HOOK_ATTRIBUTE, "start")
    return function


def on_stop(function: F) -> F:
    """Run this method (plain or `async`) after the last call was answered."""
    setattr(function, HOOK_ATTRIBUTE, "stop")
    return function


def is_service(candidate: Any) -> bool:
    """Whether `candidate` is a class with its own `@service` decorator."""
    return isinstance(candidate, type) and SPEC_ATTRIBUTE in vars(candidate)


def spec_of(service: type[Any]) -> ServiceSpec:
    """Return the declaration of a decorated class. Raises `ConfigError` for another object."""
    if not is_service(service):
        name = getattr(service, "__name__", repr(service))
        raise ConfigError(f"{name} is not a service", hint=f"put @service(...) above class {name}")
    return cast("ServiceSpec", vars(service)[SPEC_ATTRIBUTE])


def role_of(service: type[Any]) -> str:
    """Return the role of a built-in service or of its subclass; "" for a user's service."""
    return str(getattr(service, ROLE_ATTRIBUTE, ""))


def builtin_service(service: type[Any]) -> type[Any]:
    """Return the built-in service that a class is or derives from, else the class itself."""
    return next((base for base in service.__mro__ if ROLE_ATTRIBUTE in vars(base)), service)


def _link(cls: type[Any], other: type[T]) -> type[T]:
    """Add `other` to this service's graph. Returns `other`, so that links can be chained."""
    spec_of(other)
    links = spec_of(cls).links
    if other not in links:
        links.append(other)
    return other


def _collect_endpoints(cls: type[Any]) -> dict[str, EndpointSpec]:
    endpoints = {
        name: getattr(value, ENDPOINT_ATTRIBUTE)
        for name, value in inspect.getmembers(cls)
        if hasattr(value, ENDPOINT_ATTRIBUTE)
    }
    names = [endpoint.name for endpoint in endpoints.values()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{cls.__name__} has two endpoints called {name!r}")
    return endpoints
