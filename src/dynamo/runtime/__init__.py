"""Components, endpoints, clients, life cycle, health and processes; knows nothing of models."""

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
