"""Components, endpoints, clients, lifecycle, health and processes; knows nothing of models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime.background import Runtime as Runtime
    from dynamo.runtime.calls.client import Client as Client
    from dynamo.runtime.calls.streams import ResponseStream as ResponseStream
    from dynamo.runtime.cancellation import CancellationToken as CancellationToken
    from dynamo.runtime.compatibility.calls import CompatContext
    from dynamo.runtime.compatibility.worker import UnaryClient as UnaryClient
    from dynamo.runtime.compatibility.worker import dynamo_endpoint as dynamo_endpoint
    from dynamo.runtime.compatibility.worker import dynamo_worker as dynamo_worker
    from dynamo.runtime.compatibility.worker import serve_unary_endpoint as serve_unary_endpoint
    from dynamo.runtime.component import Component as Component
    from dynamo.runtime.component import Endpoint as Endpoint
    from dynamo.runtime.component import Namespace as Namespace
    from dynamo.runtime.component import ServedEndpoint as ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime as DistributedRuntime
    from dynamo.runtime.worker_discovery import WorkerDiscovery as WorkerDiscovery
    from dynamo.runtime.worker_discovery import WorkerInfo as WorkerInfo

    Context = CompatContext

_MODULE_OF = {
    "CancellationToken": "cancellation",
    "Client": "calls.client",
    "Component": "component",
    "Context": "compatibility.calls",
    "DistributedRuntime": "distributed",
    "Endpoint": "component",
    "Namespace": "component",
    "ResponseStream": "calls.streams",
    "Runtime": "background",
    "ServedEndpoint": "component",
    "UnaryClient": "compatibility.worker",
    "WorkerDiscovery": "worker_discovery",
    "WorkerInfo": "worker_discovery",
    "dynamo_endpoint": "compatibility.worker",
    "dynamo_worker": "compatibility.worker",
    "serve_unary_endpoint": "compatibility.worker",
}
__all__ = list(_MODULE_OF)

if not TYPE_CHECKING:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        """Load the module of a public name on first use, so that importing dynamo stays instant."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        defined_name = "CompatContext" if name == "Context" else name
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), defined_name)
        return value
