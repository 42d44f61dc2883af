"""Components, endpoints, clients, lifecycle, health and processes; knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.library.worker_discovery import WorkerDiscovery as WorkerDiscovery
    from dynamo.library.worker_discovery import WorkerInfo as WorkerInfo
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

    Context = CompatContext

_HOMES = {
    "CancellationToken": "dynamo.runtime.cancellation",
    "Client": "dynamo.runtime.calls.client",
    "Component": "dynamo.runtime.component",
    "Context": "dynamo.runtime.compatibility.calls:CompatContext",
    "DistributedRuntime": "dynamo.runtime.distributed",
    "Endpoint": "dynamo.runtime.component",
    "Namespace": "dynamo.runtime.component",
    "ResponseStream": "dynamo.runtime.calls.streams",
    "Runtime": "dynamo.runtime.background",
    "ServedEndpoint": "dynamo.runtime.component",
    "UnaryClient": "dynamo.runtime.compatibility.worker",
    "WorkerDiscovery": "dynamo.library.worker_discovery",
    "WorkerInfo": "dynamo.library.worker_discovery",
    "dynamo_endpoint": "dynamo.runtime.compatibility.worker",
    "dynamo_worker": "dynamo.runtime.compatibility.worker",
    "serve_unary_endpoint": "dynamo.runtime.compatibility.worker",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    __getattr__ = load_on_use(__name__, _HOMES)
