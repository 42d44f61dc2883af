"""Components, endpoints, clients, life cycle, health and processes; knows nothing of models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime.background import Runtime
    from dynamo.runtime.cancellation import CancellationToken
    from dynamo.runtime.client import Client
    from dynamo.runtime.component import Component, Endpoint, Namespace, Served
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.health import Health
    from dynamo.runtime.instances import Instance
    from dynamo.runtime.lifecycle import Lifecycle, State
    from dynamo.runtime.registry import ComponentRegistry
    from dynamo.runtime.streams import Stream
    from dynamo.runtime.workers import WorkerDiscovery, WorkerInfo

__all__ = [
    "CancellationToken",
    "Client",
    "Component",
    "ComponentRegistry",
    "DistributedRuntime",
    "Endpoint",
    "Health",
    "Instance",
    "Lifecycle",
    "Namespace",
    "Runtime",
    "Served",
    "State",
    "Stream",
    "WorkerDiscovery",
    "WorkerInfo",
]

_HOMES = {
    "CancellationToken": "cancellation",
    "Client": "client",
    "Component": "component",
    "ComponentRegistry": "registry",
    "DistributedRuntime": "distributed",
    "Endpoint": "component",
    "Health": "health",
    "Instance": "instances",
    "Lifecycle": "lifecycle",
    "Namespace": "component",
    "Runtime": "background",
    "Served": "component",
    "State": "lifecycle",
    "Stream": "streams",
    "WorkerDiscovery": "workers",
    "WorkerInfo": "workers",
}

if not TYPE_CHECKING:  # so that a name which is not there stays an error to the type checker

    def __getattr__(name: str) -> Any:
        """Public names load their module on first use: who only looks at what runs needs none."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return found
