"""The operator on the API server of a test cluster, or on a real one, seen through the API alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.api_graphs import GRAPHS, Graphs
from tests.support.control_plane import TOKEN
from tests.support.kubernetes import MERGE, KubernetesClient, account_environment
from tests.support.kubernetes_graphs import component, graph

QUIET_S = 2.0
ADAPTER = "dynamographdeploymentscalingadapters/llm-decode"
TWO = graph(component("Frontend", "frontend"), component("decode", "decode", 2, scalingAdapter={}))


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
