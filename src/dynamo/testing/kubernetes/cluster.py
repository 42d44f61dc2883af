"""A whole cluster within a test: API server, controllers, and pods that are processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from dynamo.core.clock import Clock
from dynamo.core.tasks import BackgroundTasks
from dynamo.testing.kubernetes.controllers.collector import GarbageCollector, Namespaces
from dynamo.testing.kubernetes.controllers.endpoints import EndpointSlices
from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.controllers.scheduling import Scheduler
from dynamo.testing.kubernetes.controllers.workloads import Deployments, ReplicaSets
from dynamo.testing.kubernetes.server import BOOKMARK_S, ApiServer

NODE = {"cpu": "64", "memory": "256Gi", "pods": "110"}
CONTROLLERS: tuple[type[Controller], ...] = (
    GarbageCollector,
    Namespaces,
    ReplicaSets,
    Deployments,
    Scheduler,
    EndpointSlices,
)


class Cluster:
    """`async with Cluster() as cluster`. `nodes` has the resources of each node by name.

    Its pods are objects alone, whose status others write. `PodCluster` runs them.
    """

    def __init__(
        self,
        nodes: Mapping[str, Mapping[str, str]] | None = None,
        *,
        clock: Clock | None = None,
        port: int = 0,
        bookmark_s: float = BOOKMARK_S,
    ) -> None:
        self.server = ApiServer(clock, bookmark_s=bookmark_s)
        self.server.port = port
        self.objects = self.server.objects
        self._nodes = {"node": NODE} if nodes is None else nodes
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Self:
        await self.server.start()
        for kind in CONTROLLERS:
            self.run(kind(self.objects))
        for name, resources in self._nodes.items():
            self.add_node(name, {**NODE, **resources})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await self.server.stop()

    def run(self, controller: Controller) -> None:
        """Run a controller until the cluster ends."""
        self._tasks.start(controller.run(), type(controller).__name__)

    def add_node(
        self, name: str, resources: Mapping[str, str], labels: Mapping[str, str] | None = None
    ) -> None:
        """Add a node that is ready."""
        target = self.objects.target("nodes", "", name, "status")
        host = {"kubernetes.io/hostname": name, **(labels or {})}
        node = self.objects.create(
            target._replace(subresource=""),
            {"metadata": {"name": name, "labels": host}, "spec": {}},
        )
        status = {
            "capacity": dict(resources),
            "allocatable": dict(resources),
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        self.objects.replace(target, node | {"status": status})
