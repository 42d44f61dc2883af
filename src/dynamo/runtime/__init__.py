"""Components, endpoints, clients, lifecycle, health and processes; knows nothing of models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime.background import Runtime
    from dynamo.runtime.calls.client import Client
    from dynamo.runtime.calls.instances import Instance
    from dynamo.runtime.calls.streams import ResponseStream
    from dynamo.runtime.cancellation import CancellationToken
    from dynamo.runtime.component import Component, Endpoint, Namespace, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.health import ProcessHealth
    from dynamo.runtime.lifecycle import Lifecycle, LifecycleState
    from dynamo.runtime.worker_discovery import ComponentRegistry, WorkerDiscovery, WorkerInfo

__all__ = [
    "CancellationToken",
    "Client",
    "Component",
    "ComponentRegistry",
    "DistributedRuntime",
    "Endpoint",
    "Instance",
    "Lifecycle",
    "LifecycleState",
    "Namespace",
    "ProcessHealth",
    "ResponseStream",
    "Runtime",
    "ServedEndpoint",
    "WorkerDiscovery",
    "WorkerInfo",
]

_NAMES = {
    "background": ("Runtime",),
    "calls.client": ("Client",),
    "calls.instances": ("Instance",),
    "calls.streams": ("ResponseStream",),
    "cancellation": ("CancellationToken",),
    "component": ("Component", "Endpoint", "Namespace", "ServedEndpoint"),
    "distributed": ("DistributedRuntime",),
    "health": ("ProcessHealth",),
    "lifecycle": ("Lifecycle", "LifecycleState"),
    "worker_discovery": ("ComponentRegistry", "WorkerDiscovery", "WorkerInfo"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        """Load the module of a public name on first use, so that importing dynamo stays instant."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value
