"""How a service is declared: decorators that only note what they are told."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from dynamo.core.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])
F = TypeVar("F", bound=Callable[..., Any])

SPEC_ATTRIBUTE = "__dynamo_service__"
ENDPOINT_ATTRIBUTE = "__dynamo_endpoint__"
HOOK_ATTRIBUTE = "__dynamo_hook__"
ROLE_ATTRIBUTE = "dynamo_role"
"""A class attribute of the services that come with this project: which process they are."""
DYNAMO_KEYS = ("namespace", "model")


class EndpointSpec(msgspec.Struct, frozen=True):
    """One endpoint. `name`: as others call it over the wire; `method`: as the class does;
    `streams`: an async generator."""

    name: str
    method: str
    streams: bool
    function: Callable[..., Any]


class ServiceSpec(msgspec.Struct):
    """What is known of a service class. `component`: as others call it over the wire, its name; for
    a class made of a ready-made one, that one's; `namespace` "": that of the settings; `model`: the
    name that its `chat` answers to over HTTP, "" = none."""

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
    """Stands in a class for the handle that its instances get."""

    def __init__(self, service: type[Any]) -> None:
        self.service = service
        self._name = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        raise ConfigError(
            f"{owner.__name__}.{self._name} is not connected: nobody started this service",
            hint="in a test use dynamo.testing.local_graph, or set the attribute to a fake",
        )


def service(
    *,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> Callable[[C], C]:
    """Make a class a service, named after it. `dynamo`: its `namespace` (else that of the
    settings), and `model`, if its `chat` endpoint is to be offered as a model over HTTP.
    `workers`: replicas, a process each. `resources` ("gpu", "cpu", "memory"): what a replica needs,
    for those that place it. Raises `ConfigError`."""
    about = dict(dynamo or {})
    for key in about.keys() - set(DYNAMO_KEYS):
        raise ConfigError(
            f"service(dynamo=...): unknown key {key!r}", hint=nearest_name_hint(key, DYNAMO_KEYS)
        )
    if workers < 1:
        raise ConfigError(f"service(workers={workers}): at least 1")

    def declare(cls: C) -> C:
        spec = ServiceSpec(
            name=cls.__name__,
            component=builtin_service(cls).__name__,
            namespace=about.get("namespace", ""),
            model=about.get("model", ""),
            workers=workers,
            resources=dict(resources or {}),
            endpoints=_collect_endpoints(cls),
            dependencies=_collect_dependencies(cls),
            start_hooks=_collect_hooks(cls, "start"),
            stop_hooks=_collect_hooks(cls, "stop"),
            links=[],
        )
        setattr(cls, SPEC_ATTRIBUTE, spec)
        cls.link = classmethod(_link)
        return cls

    return declare


def dynamo_endpoint(name: str | None = None) -> Callable[[F], F]:
    """Let others call this method: a coroutine function answers once, an async generator function
    streams. `name`: what it is called by references, else the method's own. It takes `self` and at
    most one request; annotations of either, of types that msgspec knows, are kept."""
    if callable(name):
        raise ConfigError("@dynamo_endpoint needs its parentheses", hint="write @dynamo_endpoint()")

    def mark(function: F) -> F:
        streams = inspect.isasyncgenfunction(function)
        if not streams and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{function.__qualname__} is no endpoint: it is not asynchronous",
                hint="write `async def`; with `yield` inside, it streams",
            )
        if len(inspect.signature(function).parameters) not in {1, 2}:
            raise ConfigError(
                f"{function.__qualname__} takes self and at most one request",
                hint="put what it needs into one dict or msgspec.Struct",
            )
        method = function.__name__
        setattr(
            function, ENDPOINT_ATTRIBUTE, EndpointSpec(name or method, method, streams, function)
        )
        return function

    return mark


def depends(service: type[T]) -> T:
    """A handle of another service, as a class attribute: its endpoints are methods. `await` those
    that answer once, `async for` those that stream. Whoever starts the service connects it."""
    spec_of(service)
    return cast("T", Dependency(service))


def on_start(function: F) -> F:
    """Run this method (plain or `async`) before the first call; dependencies can be called."""
    setattr(function, HOOK_ATTRIBUTE, "start")
    return function


def on_stop(function: F) -> F:
    """Run this method (plain or `async`) after the last call was answered."""
    setattr(function, HOOK_ATTRIBUTE, "stop")
    return function


def is_service(found: Any) -> bool:
    """Is it a class with the decorator of its own?"""
    return isinstance(found, type) and SPEC_ATTRIBUTE in vars(found)


def spec_of(service: type[Any]) -> ServiceSpec:
    """What a decorated class declares. Raises `ConfigError` for another."""
    if not is_service(service):
        name = getattr(service, "__name__", repr(service))
        raise ConfigError(f"{name} is no service", hint=f"put @service(...) above class {name}")
    return cast("ServiceSpec", vars(service)[SPEC_ATTRIBUTE])


def role_of(service: type[Any]) -> str:
    """The role of a ready-made service, or of a class made of one; "" for a user's own."""
    return str(getattr(service, ROLE_ATTRIBUTE, ""))


def builtin_service(service: type[Any]) -> type[Any]:
    """The ready-made service that a class is, or is made of; a user's own is itself."""
    return next((one for one in service.__mro__ if ROLE_ATTRIBUTE in vars(one)), service)


def nearest_name_hint(wrong: str, known: Any) -> str:
    """A hint that names the known word nearest to a wrong one."""
    known = list(known)
    found = difflib.get_close_matches(wrong, known, n=1)
    if found:
        return f"did you mean {found[0]!r}?"
    return f"known: {', '.join(known)}" if known else "there are none"


def _link(cls: type[Any], other: type[T]) -> type[T]:
    """Say that `other` belongs to this service's graph. Returns `other`, for the next link."""
    spec_of(other)
    links = spec_of(cls).links
    if other not in links:
        links.append(other)
    return other


def _collect_endpoints(cls: type[Any]) -> dict[str, EndpointSpec]:
    found = {
        name: getattr(value, ENDPOINT_ATTRIBUTE)
        for name, value in inspect.getmembers(cls)
        if hasattr(value, ENDPOINT_ATTRIBUTE)
    }
    names = [endpoint.name for endpoint in found.values()]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{cls.__name__} has two endpoints called {name!r}")
    return found


def _collect_dependencies(cls: type[Any]) -> dict[str, type[Any]]:
    return {
        name: value.service
        for name, value in inspect.getmembers(cls)
        if isinstance(value, Dependency)
    }


def _collect_hooks(cls: type[Any], moment: str) -> tuple[str, ...]:
    return tuple(
        name
        for name, value in inspect.getmembers(cls)
        if getattr(value, HOOK_ATTRIBUTE, "") == moment
    )
