"""An operator in a test cluster whose pods are only said to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.kubernetes import APPLY, KubernetesClient, account_environment

from dynamo.communication.kubernetes.link import open_link
from dynamo.core.clock import SystemClock
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.manifests import read_manifests
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.loop import OperatorLoop
from dynamo.services.operator.pod_load import ReadLoad
from dynamo.testing.kubernetes.cluster import NODE, Cluster
from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.store import Change

GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
ADAPTERS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeploymentscalingadapters"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
INSTALLATION = Path(__file__).parents[2] / "deploy" / "kubernetes" / "operator.yaml"
UNTIL_S = 30.0


class ReadyPods(Controller):
    """Says that bound pods are ready, and ends deleted ones. `unready` has images whose pods do not
    become ready."""

    kinds = ("pods",)
    unready: set[str]

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        return () if change.deleted else ((metadata["namespace"], metadata["name"]),)

    def reconcile(self, key: Any) -> None:
        pod = self.store.get("pods", key)
        if pod is None:
            return
        if "deletionTimestamp" in pod["metadata"]:
            self.objects.delete(self.target("pods", pod), {"gracePeriodSeconds": 0})
            return
        if not pod["spec"].get("nodeName") or pod["spec"]["containers"][0]["image"] in self.unready:
            return
        status = pod.get("status") or {}
        ready = {"type": "Ready", "status": "True"}
        others = [row for row in status.get("conditions") or () if row["type"] != "Ready"]
        self.put_status("pods", pod, {**status, "phase": "Running", "conditions": [*others, ready]})


async def no_load(pod: Mapping[str, Any]) -> float | None:
    """Know nothing of a pod's load."""
    del pod
    return None


class GraphCluster:
    """A cluster with the kinds of graphs, ready pods, a client, and the operator's own rights."""

    def __init__(self, folder: Path, nodes: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._folder = folder
        self._cluster = Cluster(nodes)
        self._tasks = BackgroundTasks()
        self._operators: list[tuple[OperatorLoop, Any]] = []

    @property
    def server(self) -> Any:
        """The API server."""
        return self._cluster.server

    async def __aenter__(self) -> Self:
        await self._cluster.__aenter__()
        for resource in custom_resources():
            target = self.server.objects.target(
                "customresourcedefinitions.apiextensions.k8s.io", "", ""
            )
            self.server.objects.create(target, resource)
        for item in read_manifests(INSTALLATION.read_text(), INSTALLATION.name):
            if item["kind"] != "Deployment":
                kind = f"{item['kind'].lower()}s"
                if "rbac" in item["apiVersion"]:
                    kind += ".rbac.authorization.k8s.io"
                namespace = item["metadata"].get("namespace", "")
                self.server.objects.create(self.server.objects.target(kind, namespace, ""), item)
        self.token = self.server.access.account_token("dynamo-system", "dynamo-operator")
        self.pods = ReadyPods(self._cluster.objects)
        self.pods.unready = set()
        self._tasks.start(self.pods.run(), "pods")
        self.client = KubernetesClient(self.server.url)
        return self

    async def __aexit__(self, *error: object) -> None:
        for loop, link in self._operators:
            await loop.close()
            await link.close()
        self.client.close()
        await self._tasks.close()
        await self._cluster.__aexit__(*error)
        if error == (None, None, None):
            assert not self.server.access.refused, self.server.access.refused

    async def operator(
        self,
        options: PodOptions | None = None,
        read_load: ReadLoad = no_load,
    ) -> OperatorLoop:
        """Start an operator, and return when it leads."""
        folder = self._folder / f"account-{len(self._operators)}"
        link = open_link(5.0, account_environment(self.server.url, self.token, folder))
        loop = OperatorLoop(link, "", SystemClock(), options or PodOptions(), read_load=read_load)
        self._operators.append((loop, link))
        await loop.start()
        loop.lead()
        return loop

    def account(self) -> Mapping[str, str]:
        """Return the variables of a process with the operator's account."""
        return account_environment(self.server.url, self.token, self._folder / "account")

    def link_of(self, loop: OperatorLoop) -> Any:
        """Return the link of an operator."""
        return next(link for operator, link in self._operators if operator is loop)

    async def kill(self, loop: OperatorLoop) -> None:
        """End an operator between two of its requests."""
        entry = next(entry for entry in self._operators if entry[0] is loop)
        self._operators.remove(entry)
        await loop.close()
        await entry[1].close()

    async def apply(self, graph: Mapping[str, Any], manager: str = "user") -> Any:
        """Apply a graph as a user does."""
        path = f"{GRAPHS}/{graph['metadata']['name']}"
        status, body = await self.client.send(
            "PATCH", path, graph, APPLY, fieldManager=manager, force="true"
        )
        assert status in (200, 201), body
        return body

    async def delete(self, name: str) -> None:
        """Delete a graph."""
        await self.client.send("DELETE", f"{GRAPHS}/{name}")

    def add_node(self, name: str, resources: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """Add a node that is ready."""
        self._cluster.add_node(name, {**NODE, **resources}, labels)

    def nodes(self) -> list[Object]:
        """Return the nodes."""
        nodes: list[Object] = self.server.store.items("nodes")
        return nodes

    def items(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects of a kind of the store, such as deployments.apps."""
        items = self.server.store.items(kind, "default")
        return [
            item
            for item in items
            if all((item["metadata"].get("labels") or {}).get(k) == v for k, v in labels.items())
        ]

    def graph(self, name: str = "llm") -> Object:
        """Return a graph as it is."""
        item = self.server.store.get("dynamographdeployments.nvidia.com", ("default", name))
        assert item is not None
        return item

    def condition(self, kind: str, name: str = "llm") -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        rows = (self.graph(name).get("status") or {}).get("conditions") or ()
        for row in rows:
            if row["type"] == kind:
                return row["status"], row.get("reason", ""), row.get("message", "")
        return "", "", ""

    def state(self, name: str = "llm") -> str:
        """Return the state of a graph, "" until it is of the present manifest."""
        graph = self.graph(name)
        status = graph.get("status") or {}
        current = status.get("observedGeneration") == graph["metadata"]["generation"]
        return str(status.get("state", "initializing")) if current else ""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(UNTIL_S):
            while not condition():
                await asyncio.sleep(0.005)


def graph(*components: Mapping[str, Any], name: str = "llm", **spec: Any) -> dict[str, Any]:
    """Return the manifest of a graph."""
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"components": list(components), **spec},
    }


def component(name: str, kind: str, replicas: int = 1, image: str = "", **more: Any) -> Any:
    """Return a component of a manifest."""
    template = {"spec": {"containers": [{"name": "main", "image": image or "dynamo:1"}]}}
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": template, **more}
