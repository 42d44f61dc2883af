"""The controllers of the test cluster: owners, Deployments, the scheduler, EndpointSlices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.kubernetes import MERGE, STRATEGIC, KubernetesClient

from dynamo.testing.kubernetes.cluster import Cluster

APPS = "/apis/apps/v1/namespaces/default"
CORE = "/api/v1/namespaces/default"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster({"n1": {"nvidia.com/gpu": "8"}, "n2": {"nvidia.com/gpu": "8"}}) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[KubernetesClient]:
    client = KubernetesClient(cluster.server.url)
    yield client
    client.close()


def deployment(replicas: int, image: str = "x", **pod: Any) -> dict[str, Any]:
    container = {"name": "main", "image": image, "resources": {"limits": {"nvidia.com/gpu": 4}}}
    template = {"metadata": {"labels": {"app": "w"}}, "spec": {"containers": [container], **pod}}
    selector = {"matchLabels": {"app": "w"}}
    spec = {"replicas": replicas, "selector": selector, "template": template}
    return {"metadata": {"name": "w"}, "spec": spec}


async def until(read: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """Let the controllers run until what is read is as wanted."""
    async with asyncio.timeout(10):
        while not holds(value := await read()):
            await asyncio.sleep(0)
        return value


async def pods_of(client: KubernetesClient) -> list[Any]:
    items = (await client.get(f"{CORE}/pods", labelSelector="app=w"))["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


async def make_ready(client: KubernetesClient, pod: Any, ready: str = "True") -> None:
    status = {
        "phase": "Running",
        "podIP": f"10.0.0.{pod['metadata']['resourceVersion'][-2:]}",
        "conditions": [{"type": "Ready", "status": ready}],
    }
    path = f"{CORE}/pods/{pod['metadata']['name']}/status"
    await client.send("PATCH", path, {"status": status}, STRATEGIC)


async def test_pods_are_bound_where_their_resources_are(client: KubernetesClient) -> None:
    await client.create(f"{APPS}/deployments", deployment(5))
    pods = await until(lambda: pods_of(client), lambda pods: len(pods) == 5)
    pods = await until(
        lambda: pods_of(client),
        lambda pods: all(pod["status"].get("conditions") for pod in pods),
    )
    nodes = [pod["spec"].get("nodeName") for pod in pods]
    assert sorted(filter(None, nodes)) == ["n1", "n1", "n2", "n2"]
    (waiting,) = (pod for pod in pods if "nodeName" not in pod["spec"])
    assert waiting["status"]["conditions"][0]["message"] == (
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    )


async def test_gated_pods_wait_and_may_be_narrowed(client: KubernetesClient) -> None:
    await client.create(f"{APPS}/deployments", deployment(1, schedulingGates=[{"name": "g"}]))
    (pod,) = await until(
        lambda: pods_of(client), lambda pods: pods and pods[0]["status"].get("conditions")
    )
    assert pod["status"]["conditions"][0]["reason"] == "SchedulingGated"
    path = f"{CORE}/pods/{pod['metadata']['name']}"
    selector = {"kubernetes.io/hostname": "n2"}
    patch = {"spec": {"nodeSelector": selector, "schedulingGates": None}}
    assert (await client.send("PATCH", path, patch, MERGE))[0] == 200
    await until(lambda: pods_of(client), lambda pods: pods[0]["spec"].get("nodeName") == "n2")
    status, body = await client.send("PATCH", path, {"spec": {"hostname": "x"}}, MERGE)
    assert (status, body["details"]["causes"][0]["reason"]) == (422, "FieldValueForbidden")


async def test_a_deployment_rolls_without_losing_pods(client: KubernetesClient) -> None:
    await client.create(f"{APPS}/deployments", deployment(3))
    for pod in await until(lambda: pods_of(client), lambda pods: len(pods) == 3):
        await make_ready(client, pod)
    await until(
        lambda: client.get(f"{APPS}/deployments/w"),
        lambda item: item.get("status", {}).get("availableReplicas") == 3,
    )
    image = {"containers": [{"name": "main", "image": "y"}]}
    patch = {"spec": {"template": {"spec": image}}}
    await client.send("PATCH", f"{APPS}/deployments/w", patch, STRATEGIC)
    for _ in range(3):
        pods = await until(
            lambda: pods_of(client),
            lambda pods: any(p["status"]["phase"] == "Pending" for p in pods),
        )
        assert sum(pod["status"]["phase"] == "Running" for pod in pods) >= 3
        for pod in pods:
            if pod["status"]["phase"] == "Pending":
                await make_ready(client, pod)
    done = await until(
        lambda: client.get(f"{APPS}/deployments/w"),
        lambda item: item["status"].get("updatedReplicas") == 3 == item["status"]["replicas"],
    )
    assert done["status"]["conditions"][1]["reason"] == "NewReplicaSetAvailable"


async def test_slices_follow_readiness(client: KubernetesClient) -> None:
    service = {"metadata": {"name": "w"}, "spec": {"selector": {"app": "w"}, "clusterIP": "None"}}
    await client.create(f"{CORE}/services", service)
    await client.create(f"{APPS}/deployments", deployment(1))

    async def conditions() -> list[Any]:
        slices = (await client.get(SLICES))["items"]
        return [e["conditions"] for item in slices for e in item["endpoints"] or ()]

    (pod,) = await until(lambda: pods_of(client), lambda pods: len(pods) == 1)
    await make_ready(client, pod, "False")
    await until(conditions, lambda value: [c["ready"] for c in value] == [False])
    await make_ready(client, pod)
    await until(conditions, lambda value: [c["ready"] for c in value] == [True])
    await client.send("DELETE", f"{CORE}/pods/{pod['metadata']['name']}")
    await until(
        conditions,
        lambda value: {"ready": False, "serving": True, "terminating": True} in value,
    )


async def test_objects_go_with_their_owners(client: KubernetesClient) -> None:
    await client.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    owner = await client.create(f"{CORE}/configmaps", {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "controller": True}
    reference["uid"] = owner["metadata"]["uid"]
    metadata = {"name": "owned", "ownerReferences": [reference]}
    await client.create(f"{CORE}/configmaps", {"metadata": metadata})
    await client.send("DELETE", f"{CORE}/configmaps/owner")
    await until(lambda: client.get(f"{CORE}/configmaps"), lambda value: not value["items"])
    await client.create("/api/v1/namespaces/other/configmaps", {"metadata": {"name": "x"}})
    await client.send("DELETE", "/api/v1/namespaces/other")
    await until(
        lambda: client.send("GET", "/api/v1/namespaces/other"), lambda answer: answer[0] == 404
    )
