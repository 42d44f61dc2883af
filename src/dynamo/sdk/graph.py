"""The graph of services: a root and all that it depends on or is linked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.sdk.decorators import spec_of


def direct_dependencies(service: type[Any]) -> Sequence[type[Any]]:
    """Return the services that a service depends on or is linked to directly."""
    spec = spec_of(service)
    return list(dict.fromkeys([*spec.dependencies.values(), *spec.links]))


def walk(root: type[Any]) -> Sequence[type[Any]]:
    """Return all services of the graph, callers first unless there is a cycle.

    Raises `ConfigError` if two services have the same name.
    """
    done: dict[type[Any], None] = {}
    entered: set[type[Any]] = set()

    def visit(service: type[Any]) -> None:
        if service in entered:
            return
        entered.add(service)
        for other in reversed(direct_dependencies(service)):
            visit(other)
        done[service] = None

    visit(root)
    order = list(reversed(done))
    names: dict[str, type[Any]] = {}
    for service in order:
        other = names.setdefault(service.__name__, service)
        if other is not service:
            raise ConfigError(
                f"two services of this graph are called {service.__name__!r}: in "
                f"{other.__module__} and {service.__module__}",
                hint="the class name is the service's name: rename one of the classes",
            )
    return order
