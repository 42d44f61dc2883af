"""The operator on the API server of a test cluster, or on a real one, seen through the API alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_plane import TOKEN
from tests.support.kubernetes import (
    APPLY,
    MERGE,
    STRATEGIC,
    KubernetesClient,
    account_environment,
)
from tests.support.kubernetes_graphs import component, graph, no_load

from dynamo.communication.kubernetes.link import KubernetesLink, open_link
from dynamo.core.clock import SystemClock
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.loop import OperatorLoop

PENDING_S = 60.0
QUIET_S = 2.0
GRAPHS = "dynamographdeployments"
ADAPTER = "dynamographdeploymentscalingadapters/llm-decode"
TWO = graph(component("Frontend", "frontend"), component("decode", "decode", 2, scalingAdapter={}))


class Graphs:
    """Graphs in a namespace of their own, whose pods this class calls ready."""

    def __init__(self, client: KubernetesClient, environment: Mapping[str, str]) -> None:
        self.client = client
        self._environment = environment
        self._stack = AsyncExitStack()
        self.writes: list[str] = []

    async def start(self) -> None:
        """Install the kinds, and let pods become ready."""
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for resource in custom_resources():
            status, body = await self.client.send("POST", crds, resource)
            assert status in (201, 409), body
        while (await self.client.send("GET", self.path(GRAPHS)))[0] != 200:
            await asyncio.sleep(0.05)
        tasks = await self._stack.enter_async_context(BackgroundTasks())
        tasks.start(self._ready_pods(), "pods")

    async def close(self) -> None:
        """Delete all graphs, and end the operators."""
        for item in (await self.client.get(self.path(GRAPHS)))["items"]:
            await self.client.send("DELETE", self.path(f"{GRAPHS}/{item['metadata']['name']}"))
        await self.until(lambda: self.names("pods"), set())
        await self._stack.aclose()

    def path(self, rest: str, group: str = "nvidia.com/v1beta1") -> str:
        """Return a path of the namespace."""
        return f"/apis/{group}/namespaces/default/{rest}"

    async def operator(self) -> OperatorLoop:
        """Start an operator whose writes are counted."""
        link = open_link(5.0, self._environment)
        self._stack.push_async_callback(link.close)
        loop = OperatorLoop(
            count_writes(link, self.writes), "", SystemClock(), PodOptions(), read_load=no_load
        )
        self._stack.push_async_callback(loop.close)
        await loop.start()
        loop.lead()
        return loop

    async def apply(self, item: Mapping[str, Any]) -> None:
        """Apply a graph as a user does."""
        version, name = item["apiVersion"], item["metadata"]["name"]
        path = self.path(f"{GRAPHS}/{name}", version)
        status, body = await self.client.send(
            "PATCH", path, item, APPLY, fieldManager="user", force="true"
        )
        assert status in (200, 201), body

    async def state(self) -> str:
        """Return the state of the graph, "" until it is of the present manifest."""
        item = await self.client.get(self.path(f"{GRAPHS}/llm"))
        status = item.get("status") or {}
        current = status.get("observedGeneration") == item["metadata"]["generation"]
        return str(status.get("state")) if current else ""

    async def names(self, plural: str) -> set[str]:
        """Return the names of the objects that belong to graphs."""
        paths = {
            "deployments": self.path(plural, "apps/v1"),
            "networkpolicies": self.path(plural, "networking.k8s.io/v1"),
            "roles": self.path(plural, "rbac.authorization.k8s.io/v1"),
        }
        path = paths.get(plural, f"/api/v1/namespaces/default/{plural}")
        label = "nvidia.com/dynamo-graph-deployment-name"
        listed = await self.client.get(path, labelSelector=label)
        return {item["metadata"]["name"] for item in listed["items"]}

    async def until(self, read: Any, wanted: Any) -> None:
        """Wait until something is as wanted."""
        end, value = time.monotonic() + PENDING_S, await read()
        while value != wanted:
            assert time.monotonic() < end, f"{value!r} is not {wanted!r}"
            await asyncio.sleep(0.05)
            value = await read()

    async def _ready_pods(self) -> None:
        """Say that all pods run, and end deleted ones."""
        pods = "/api/v1/namespaces/default/pods"
        ready = [{"type": "Ready", "status": "True"}]
        while True:
            for pod in (await self.client.get(pods))["items"]:
                path = f"{pods}/{pod['metadata']['name']}"
                if "deletionTimestamp" in pod["metadata"]:
                    await self.client.send("DELETE", path, {"gracePeriodSeconds": 0})
                elif (pod.get("status") or {}).get("phase") != "Running":
                    status = {"phase": "Running", "podIP": "10.1.0.1", "conditions": ready}
                    await self.client.send("PATCH", f"{path}/status", {"status": status}, STRATEGIC)
            await asyncio.sleep(0.1)


def count_writes(link: KubernetesLink, writes: list[str]) -> KubernetesLink:
    """Note the requests of a link that write, without events and dry runs."""
    send = link.request

    async def request(method: str, path: str, *more: Any, **options: Any) -> bytes:
        if method != "GET" and "/events" not in path and "dryRun" not in path:
            writes.append(f"{method} {path}")
        return await send(method, path, *more, **options)

    link.request = request  # type: ignore[method-assign]
    return link


@pytest.fixture
async def graphs(api_server: tuple[str, bytes], tmp_path: Path) -> AsyncIterator[Graphs]:
    url, ca = api_server
    async with AsyncExitStack() as stack:
        client = KubernetesClient(url, TOKEN, ca)
        stack.callback(client.close)
        graphs = Graphs(client, account_environment(url, TOKEN, tmp_path / "account", ca))
        await graphs.start()
        stack.push_async_callback(graphs.close)
        yield graphs


async def test_a_graph_is_ready_and_then_nothing_is_written(graphs: Graphs) -> None:
    loop = await graphs.operator()
    await graphs.apply(TWO)
    await graphs.until(graphs.state, "successful")
    assert await graphs.names("services") == {"llm-frontend", "llm-pods"}
    assert len(await graphs.names("pods")) == 3
    assert await graphs.names("networkpolicies") == {"llm"}
    await asyncio.sleep(QUIET_S)  # the last events may cause writes
    before = len(graphs.writes)
    await asyncio.sleep(QUIET_S)
    await loop.close()
    second = await graphs.operator()
    await asyncio.sleep(QUIET_S)
    assert second.is_idle
    assert graphs.writes[before:] == []


async def test_the_scale_subresource_of_an_adapter(graphs: Graphs) -> None:
    await graphs.operator()
    await graphs.apply(TWO)
    await graphs.until(graphs.state, "successful")
    scale = graphs.path(f"{ADAPTER}/scale")
    status, body = await graphs.client.send("PATCH", scale, {"spec": {"replicas": 4}}, MERGE)
    assert status == 200, body

    async def replicas() -> tuple[int, int]:
        shown = await graphs.client.get(scale)
        selector = shown["status"]["selector"]
        listed = await graphs.client.get("/api/v1/namespaces/default/pods", labelSelector=selector)
        return shown["status"]["replicas"], len(listed["items"])

    await graphs.until(replicas, (4, 4))
    await graphs.until(graphs.state, "successful")
    item = await graphs.client.get(graphs.path(f"{GRAPHS}/llm"))
    assert item["spec"]["components"][1]["replicas"] == 4


async def test_an_update_replaces_all_pods_and_a_deletion_leaves_nothing(graphs: Graphs) -> None:
    await graphs.operator()
    await graphs.apply(TWO)
    await graphs.until(graphs.state, "successful")
    old = await graphs.names("deployments")
    newer = component("decode", "decode", 2, image="dynamo:2", scalingAdapter={})
    await graphs.apply(graph(component("Frontend", "frontend"), newer))
    await graphs.until(graphs.state, "successful")
    assert not old & await graphs.names("deployments")
    await graphs.client.send("DELETE", graphs.path(f"{GRAPHS}/llm"))
    for plural in ("deployments", "services", "roles", "secrets", "pods"):
        await graphs.until(lambda plural=plural: graphs.names(plural), set())


async def test_both_versions_are_stored_as_they_are(graphs: Graphs) -> None:
    services = {"Worker": {"componentType": "worker", "replicas": 1, "extraPodSpec": {"x": 1}}}
    old = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "old"},
        "spec": {"services": services, "envs": [{"name": "A", "value": "1"}]},
    }
    await graphs.apply(old)
    for version in ("nvidia.com/v1alpha1", "nvidia.com/v1beta1"):
        item = await graphs.client.get(graphs.path(f"{GRAPHS}/old", version))
        assert item["apiVersion"] == version
        assert item["spec"]["services"] == services
        assert item["spec"]["envs"] == old["spec"]["envs"]  # type: ignore[index]
        assert "components" not in item["spec"]
    wrong = graph(component("Frontend", "frontend", -1), name="wrong")
    status, body = await graphs.client.send("POST", graphs.path(GRAPHS), wrong)
    assert status == 422
    field = body["details"]["causes"][0]["field"]
    assert field.replace("[0]", "") == "spec.components.replicas"  # 1.20 names no items
    status, body = await graphs.client.send(
        "PATCH", graphs.path(f"{GRAPHS}/old/status"), {"status": {"state": "failed"}}, MERGE
    )
    assert (status, body["status"]["state"], body["metadata"]["generation"]) == (200, "failed", 1)
