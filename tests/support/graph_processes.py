"""Graphs whose pods are processes, with an operator in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.faults.stream_client import Answer, KeptConnection, ask
from tests.support.kubernetes import APPLY, KubernetesClient, account_environment

from dynamo.communication.kubernetes.link import open_link
from dynamo.core.clock import SystemClock
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.loop import OperatorLoop
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.kubelet.cluster import PodCluster
from dynamo.testing.kubernetes.kubelet.pods import PodRun

GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
GRAPH_ID = "dynamographdeployments.nvidia.com"
CRD_ID = "customresourcedefinitions.apiextensions.k8s.io"
UNTIL_S = 100.0


class GraphProcesses:
    """A cluster with the kinds of graphs, an operator, and pods that are processes."""

    def __init__(self, nodes: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.cluster = PodCluster(nodes, probe_s=0.25, backoff_s=0.5)
        self._options = PodOptions(drain_s=10)

    async def __aenter__(self) -> Self:
        cluster = await self.cluster.__aenter__()
        self.server = cluster.server
        for resource in custom_resources():
            target = self.server.objects.target(CRD_ID, "", "")
            self.server.objects.create(target, dict(resource))
        self.client = KubernetesClient(self.server.url, cluster.token)
        folder = cluster.folder / "operator"
        self._link = open_link(5.0, account_environment(self.server.url, cluster.token, folder))
        self._operator = OperatorLoop(self._link, "", SystemClock(), self._options)
        await self._operator.start()
        self._operator.lead()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._operator.close()
        await self._link.close()
        self.client.close()
        await self.cluster.__aexit__(None, None, None)

    async def apply(self, graph: Mapping[str, Any]) -> None:
        """Apply a graph."""
        path = f"{GRAPHS}/{graph['metadata']['name']}"
        status, body = await self.client.send(
            "PATCH", path, graph, APPLY, fieldManager="user", force="true"
        )
        assert status in (200, 201), body

    def graph(self, name: str) -> Object:
        """Return a graph as it is."""
        item = self.server.store.get(GRAPH_ID, ("default", name))
        assert item is not None
        return item

    def is_successful(self, name: str) -> bool:
        """Return whether all components of the present manifest are ready, and no others exist."""
        graph = self.graph(name)
        status = graph.get("status") or {}
        current = status.get("observedGeneration") == graph["metadata"]["generation"]
        return current and status.get("state") == "successful"

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(UNTIL_S):
            while not condition():
                await asyncio.sleep(0.02)

    def host(self, graph: str) -> str:
        """Return the address of a graph's frontends on this host."""
        service = self.server.store.get("services", ("default", f"{graph}-frontend"))
        assert service is not None
        return str(service["spec"]["clusterIP"].replace("10.", "127.", 1))

    def runs(self, role: str) -> list[PodRun]:
        """Return the pods of a component that are not ending."""
        runs = self.cluster.kubelet.runs.values()
        return [
            run
            for run in runs
            if run.pod["metadata"]["labels"]["nvidia.com/dynamo-component"] == role
            and "deletionTimestamp" not in run.pod["metadata"]
        ]


class Load:
    """Streams in turn from a number of clients, each on a new connection."""

    def __init__(self, pods: GraphProcesses, clients: int) -> None:
        self._pods = pods
        self._clients = clients
        self._tasks = BackgroundTasks()
        self._stopping = False
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Self:
        for client in range(self._clients):
            self._tasks.start(self._ask(client))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await self._tasks.join()

    async def _ask(self, client: int) -> None:
        while not self._stopping:
            async with KeptConnection(8000, self._pods.host("llm")) as connection:
                self.answers.append(await ask(0, client, 30, connection=connection))

    async def more(self, count: int) -> None:
        """Wait for more answers."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(60):
            while len(self.answers) < wanted:
                await asyncio.sleep(0.02)

    def assert_unaffected(self) -> None:
        """Assert that every answer is complete, and the same for the same prompt."""
        bad = [answer for answer in self.answers if not answer.complete]
        assert not bad, bad[:3]
        assert len({answer.text for answer in self.answers}) == self._clients


def make_graph(
    model: Path, *, workers: int = 2, frontends: int = 2, image: str = "dynamo:1", **env: str
) -> dict[str, Any]:
    """Return a graph of frontends and simulated workers."""
    main = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", "dynamo.mocker"],
        "args": ["--model-path", str(model), "--model-name", "tiny"],
        "env": [{"name": name, "value": value} for name, value in env.items()],
    }
    template = {"spec": {"containers": [main]}}
    components = [
        {"name": "front", "type": "frontend", "replicas": frontends},
        {"name": "work", "type": "worker", "replicas": workers, "podTemplate": template},
    ]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "llm"},
        "spec": {
            "components": components,
            "env": [{"name": "DYNAMO_SERVER__LEAVE_S", "value": "2"}],
        },
    }
