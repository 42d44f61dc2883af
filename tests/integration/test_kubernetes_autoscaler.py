"""A real HorizontalPodAutoscaler scales a component by metrics of its processes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.faults.stream_client import Answer, KeptConnection, ask, body_of, read
from tests.support.control_plane import ASSETS, TOKEN, ControlPlane
from tests.support.graph_processes import make_graph
from tests.support.kubernetes import (
    APPLY,
    KubernetesClient,
    account_environment,
    install_account,
    install_kinds,
    note_refusals,
)
from tests.support.metrics_api import MetricsApi, sum_of
from tests.support.process_pods import ProcessPods

from dynamo.communication.kubernetes.link import open_link
from dynamo.core.clock import SystemClock
from dynamo.operations.operator.pods import PodOptions
from dynamo.services.operator.loop import OperatorLoop
from dynamo.services.operator.pod_load import GAUGES
from dynamo.testing.kubernetes.kubelet.proxies import host_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ASSETS, reason="needs KUBEBUILDER_ASSETS"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.timeout(400),
]
AUTOSCALING = Path(__file__).parents[2] / "deploy" / "kubernetes" / "autoscaling"
NAMESPACE = "/namespaces/default"
GRAPH = f"/apis/nvidia.com/v1beta1{NAMESPACE}/dynamographdeployments/llm"
ADAPTER = f"/apis/nvidia.com/v1beta1{NAMESPACE}/dynamographdeploymentscalingadapters/llm-work"
REQUESTS = frozenset({"dynamo_worker_running_requests", "dynamo_worker_waiting_requests"})
UNTIL_S = 150.0
TARGET = 4
"""Requests of a worker."""
TOKENS = 5000


class Autoscaled:
    """A graph on a real control plane, whose pods are processes, and an autoscaler."""

    def __init__(self, client: KubernetesClient, pods: ProcessPods) -> None:
        self.client, self.pods = client, pods

    async def apply(self, path: str, item: Mapping[str, Any]) -> None:
        """Apply an object as a user does."""
        status, body = await self.client.send("PATCH", path, item, APPLY, fieldManager="user")
        assert status in (200, 201), body

    async def workers(self) -> int:
        """Return the number of workers if the graph is ready, else -1."""
        graph = await self.client.get(GRAPH)
        state = (graph.get("status") or {}).get("state")
        status, scale = await self.client.send("GET", f"{ADAPTER}/scale")
        if status != 200 or state != "successful":
            return -1
        count = int(scale["status"].get("replicas", 0))
        return count if scale["spec"]["replicas"] == count else -1

    async def until_workers(self, wanted: int) -> None:
        """Wait until so many workers are ready, and no others."""
        end = time.monotonic() + UNTIL_S
        while (count := await self.workers()) != wanted:
            assert time.monotonic() < end, (count, (await self.client.get(GRAPH))["status"])
            await asyncio.sleep(0.2)

    async def until_ordered(self, wanted: int) -> None:
        """Wait until the autoscaler has ordered so many workers."""
        async with asyncio.timeout(UNTIL_S):
            while (await self.client.get(f"{ADAPTER}/scale"))["spec"]["replicas"] != wanted:
                await asyncio.sleep(0.1)

    async def host(self) -> str:
        """Return the address of the frontend on this host."""
        service = await self.client.get(f"/api/v1{NAMESPACE}/services/llm-frontend")
        return host_address(service["spec"]["clusterIP"])


def autoscaler() -> dict[str, Any]:
    """Return the autoscaler of the repository for this graph, as Kubernetes 1.20 has it."""
    item: dict[str, Any] = yaml.safe_load((AUTOSCALING / "hpa.yaml").read_text())
    item["apiVersion"] = "autoscaling/v2beta2"
    item["metadata"]["name"] = item["spec"]["scaleTargetRef"]["name"] = "llm-work"
    (metric,) = item["spec"]["metrics"]
    metric["pods"]["target"]["averageValue"] = str(TARGET)
    item["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 3
    return item


@pytest.fixture
async def scaled(tmp_path: Path) -> AsyncIterator[Autoscaled]:
    async with AsyncExitStack() as stack:
        plane = stack.enter_context(ControlPlane(tmp_path, with_scheduler=True))
        client = KubernetesClient(plane.url, TOKEN, plane.ca)
        stack.callback(client.close)
        await install_kinds(client)
        token, refused = await install_account(client), list[str]()
        account = account_environment(plane.url, token, tmp_path / "operator", plane.ca)
        link = note_refusals(open_link(5.0, account), refused)
        stack.push_async_callback(link.close)
        pods = await stack.enter_async_context(ProcessPods(plane, client, tmp_path))
        metrics = {"dynamo_worker_requests": REQUESTS}
        await stack.enter_async_context(MetricsApi(client, tmp_path, metrics))
        options = PodOptions(drain_s=10)
        loop = OperatorLoop(
            link, "", SystemClock(), options, read_load=lambda pod: sum_of(pod, GAUGES)
        )
        stack.push_async_callback(loop.close)
        await loop.start()
        loop.lead()
        yield Autoscaled(client, pods)
        await client.send("DELETE", GRAPH)
        assert not refused


async def test_an_autoscaler_follows_the_requests_and_breaks_no_stream(
    scaled: Autoscaled, tiny_model: Path
) -> None:
    graph = make_graph(tiny_model, workers=1, frontends=1)
    graph["spec"]["components"][1]["scalingAdapter"] = {}
    await scaled.apply(GRAPH, graph)
    await scaled.until_workers(1)
    host = await scaled.host()
    path = f"/apis/autoscaling/v2beta2{NAMESPACE}/horizontalpodautoscalers/llm-work"
    await scaled.apply(path, autoscaler())

    async def ask_often(client: int) -> list[Answer]:
        answers = []
        while not done.is_set():
            async with KeptConnection(8000, host) as connection:
                answers.append(await ask(0, client, 60, connection=connection))
        return answers

    async def read_long(answer: Answer) -> None:
        async with KeptConnection(8000, host) as connection:
            await read(8000, answer, body_of(answer.key, TOKENS, 8), 200.0, connection)

    done = asyncio.Event()
    long = [Answer(key) for key in range(TARGET)]
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(ask_often(client)) for client in range(4 * TARGET)]
        await scaled.until_workers(4)
        streams = [group.create_task(read_long(answer)) for answer in long]
        for answer in long:
            await answer.begun.wait()
        done.set()
        await scaled.until_ordered(1)
        assert not any(stream.done() for stream in streams), "the streams are too short"
        await scaled.until_workers(1)
    answers = [answer for client in clients for answer in client.result()]
    bad = [answer for answer in (*answers, *long) if not answer.complete]
    assert not bad, bad[:3]
    assert len({answer.worker for answer in long}) > 1
    item = await scaled.client.get(path)
    conditions = {row["type"]: row["status"] for row in item["status"]["conditions"]}
    assert conditions["ScalingActive"] == conditions["AbleToScale"] == "True"
