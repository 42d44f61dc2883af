"""Gangs behind scheduling gates: together in one domain, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes_graphs import GraphCluster, component, graph

from dynamo.operations.operator import gangs
from dynamo.operations.operator.gangs import GANG, OPENED, GatedGraph, plan_gangs
from dynamo.operations.operator.kinds import ComponentSpec, GraphSpec
from dynamo.operations.operator.status import time_text
from dynamo.operations.placement.topology import Topology

RACK, BLOCK = "topology.kubernetes.io/rack", "topology.kubernetes.io/block"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    """A cluster of two racks with two nodes of 4 GPUs each."""
    async with GraphCluster(tmp_path, {}) as cluster:
        for number in range(4):
            labels = {BLOCK: "b0", RACK: f"r{number // 2}"}
            cluster.add_node(f"n{number}", {"nvidia.com/gpu": "4"}, labels)
        yield cluster


def with_gpus(name: str, kind: str, replicas: int, gpus: int) -> Any:
    part = component(name, kind, replicas)
    part["podTemplate"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return part


def gang(name: str, prefill: int, decode: int, gpus: int = 2, **spec: Any) -> Any:
    parts = [
        component("Frontend", "frontend"),
        with_gpus("prefill", "prefill", prefill, gpus),
        with_gpus("decode", "decode", decode, gpus),
    ]
    return graph(*parts, name=name, **{"topologyConstraint": {"packDomain": "rack"}, **spec})


def racks(cluster: GraphCluster, name: str) -> set[str]:
    """Return the racks in which the pods of a graph are bound."""
    nodes = {node["metadata"]["name"]: node["metadata"]["labels"][RACK] for node in cluster.nodes()}
    pods = cluster.items("pods", **{"nvidia.com/dynamo-graph-deployment-name": name})
    return {nodes[pod["spec"]["nodeName"]] for pod in pods if pod["spec"].get("nodeName")}


async def test_a_graph_starts_in_one_rack(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(gang("llm", 2, 2))
    await cluster.until(lambda: cluster.state() == "successful")
    assert len(racks(cluster, "llm")) == 1
    assert cluster.condition("Placed")[:2] == ("True", "AllPlaced")


async def test_a_graph_without_room_holds_nothing_and_says_why(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(gang("first", 3, 3))  # 6 of 8 pods of 2 GPUs in all
    await cluster.until(lambda: cluster.condition("Placed", "first")[0] == "False")

    def bound(name: str) -> int:
        pods = cluster.items("pods", **{"nvidia.com/dynamo-graph-deployment-name": name})
        return sum(bool(pod["spec"].get("nodeName")) for pod in pods)

    await cluster.until(lambda: bound("first") >= 3)
    await cluster.apply(gang("large", 1, 1, gpus=8))
    await cluster.until(lambda: "lacks" in cluster.condition("Placed", "large")[2])
    assert cluster.condition("Placed", "large")[1] == "WaitsForRoom"
    assert bound("large") == 0
    assert cluster.state("large") != "successful"


async def test_a_level_that_no_node_has_is_told(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(gang("llm", 1, 1, topologyConstraint={"packDomain": "row"}))
    await cluster.until(lambda: "no node has a level 'row'" in cluster.condition("Placed")[2])


async def test_a_gang_waits_until_room_is_there(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(gang("first", 1, 1, gpus=4))
    await cluster.apply(gang("second", 1, 1, gpus=4))
    await cluster.until(
        lambda: cluster.state("first") == "successful" and cluster.state("second") == "successful"
    )
    await cluster.apply(gang("third", 1, 1, gpus=4))
    await cluster.until(lambda: cluster.condition("Placed", "third")[0] == "False")
    await asyncio.sleep(0.1)
    assert not racks(cluster, "third")
    await cluster.delete("first")
    await cluster.until(lambda: cluster.state("third") == "successful")


def test_a_gang_that_is_not_bound_in_time_is_given_up() -> None:
    def pod(name: str, node: str, gang: str) -> Any:
        labels = {"nvidia.com/dynamo-component": "decode", "nvidia.com/dynamo-worker-hash": "h"}
        annotations = {OPENED: time_text(1000.0), GANG: gang}
        metadata = {"name": name, "labels": labels, "annotations": annotations}
        return {"metadata": metadata, "spec": {"containers": [], "nodeName": node}}

    spec = GraphSpec(components=[ComponentSpec(name="decode", type="decode")])
    pods = [pod("a", "n0", "late"), pod("b", "", "late"), pod("c", "n0", "bound")]
    graphs = [GatedGraph(("lab", "llm"), spec, pods)]
    assert not plan_gangs(graphs, Topology([]), 1059.0).expired
    expired = plan_gangs(graphs, Topology([]), 1061.0).expired
    assert [item["metadata"]["name"] for item in expired] == ["a", "b"]


async def test_a_gang_that_lacks_pods_for_too_long_is_made_again(
    cluster: GraphCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pods() -> list[Any]:
        return [pod for pod in cluster.items("pods") if "deletionTimestamp" not in pod["metadata"]]

    def fail_one() -> None:
        pod = next(pod for pod in pods() if "decode" in pod["metadata"]["name"])
        lost = [{"type": "Ready", "status": "False"}]
        cluster.pods.put_status("pods", pod, {**pod["status"], "conditions": lost})

    await cluster.operator()
    cluster.pods.unready.add("dynamo:1")
    await cluster.apply(gang("llm", 1, 1))
    await cluster.until(lambda: len(pods()) == 3)
    assert cluster.condition("MinAvailableBreached")[0] == ""  # not all were ready yet
    cluster.pods.unready.clear()
    cluster.pods.mark(("default", pod["metadata"]["name"]) for pod in pods())
    await cluster.until(lambda: cluster.state() == "successful")
    assert cluster.condition("MinAvailableBreached")[0] == "False"
    first = {pod["metadata"]["uid"] for pod in pods()}

    cluster.pods.unready.add("dynamo:1")
    fail_one()
    await cluster.until(lambda: cluster.condition("MinAvailableBreached")[0] == "True")
    assert "decode: fewer pods" in cluster.condition("MinAvailableBreached")[2]
    cluster.pods.unready.clear()
    cluster.pods.mark(("default", pod["metadata"]["name"]) for pod in pods())
    await cluster.until(lambda: cluster.condition("MinAvailableBreached")[0] == "False")
    assert {pod["metadata"]["uid"] for pod in pods()} == first

    monkeypatch.setattr(gangs, "TERMINATION_S", 1.0)
    cluster.pods.unready.add("dynamo:1")
    fail_one()
    await cluster.until(lambda: len({pod["metadata"]["uid"] for pod in pods()} - first) == 3)
    await cluster.until(lambda: cluster.condition("MinAvailableBreached")[0] == "")
    cluster.pods.unready.clear()
    cluster.pods.mark(("default", pod["metadata"]["name"]) for pod in pods())
    await cluster.until(lambda: cluster.state() == "successful")
    assert len(racks(cluster, "llm")) == 1
