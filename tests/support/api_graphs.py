"""Graphs in a cluster, by its API alone: of a test cluster or of a real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from tests.support.kubernetes import APPLY, STRATEGIC, KubernetesClient, install_kinds
from tests.support.kubernetes_graphs import no_load

from dynamo.communication.kubernetes.link import KubernetesLink, open_link
from dynamo.core.clock import SystemClock
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.loop import OperatorLoop

PENDING_S = 60.0
GRAPHS = "dynamographdeployments"


class Graphs:
    """Graphs in a namespace of their own, whose pods this class calls ready."""

    def __init__(self, client: KubernetesClient, environment: Mapping[str, str]) -> None:
        self.client = client
        self._environment = environment
        self._stack = AsyncExitStack()
        self.writes: list[str] = []

    async def start(self) -> None:
        """Install the kinds, and let pods become ready."""
        await install_kinds(self.client)
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
