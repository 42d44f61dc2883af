"""The conditions of a graph that does not serve: each reason that the docs list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import deepcopy
from pathlib import Path

import pytest
from tests.support.kubernetes_graphs import GraphCluster, component, graph

from dynamo.operations.operator.desired import desired
from dynamo.operations.operator.view import Observed

GRAPH = graph(component("Frontend", "frontend"), component("decode", "decode", 2))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    async with GraphCluster(tmp_path) as cluster:
        yield cluster


async def test_pods_that_no_node_takes(cluster: GraphCluster) -> None:
    await cluster.operator()
    item = deepcopy(GRAPH)
    (main,) = item["spec"]["components"][1]["podTemplate"]["spec"]["containers"]
    main["resources"] = {"limits": {"nvidia.com/gpu": "64"}}
    await cluster.apply(item)
    await cluster.until(lambda: cluster.condition("Ready")[1] == "insufficient_capacity")
    assert "Insufficient nvidia.com/gpu" in cluster.condition("Ready")[2]


async def test_an_update_whose_pods_do_not_get_ready_waits(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful")
    cluster.pods.unready.add("bad:1")
    item = deepcopy(GRAPH)
    item["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["image"] = "bad:1"
    await cluster.apply(item)
    await cluster.until(lambda: cluster.condition("Ready")[1] == "updating")
    live = {
        (child["kind"], child["metadata"]["name"]): child
        for kind in ("deployments.apps", "services", "poddisruptionbudgets.policy")
        for child in cluster.items(kind)
    }
    now = 10 * 365 * 86400.0 + 1.7e9
    later = Observed(now, live, cluster.items("pods"), secret=None)
    rows = {row.type: row for row in desired(cluster.graph(), later).status.conditions}
    assert rows["Ready"].reason == "RolloutStuck"


def test_an_older_server_starts_the_pods_of_a_gang_one_by_one() -> None:
    item = deepcopy(GRAPH)
    item["metadata"] |= {"namespace": "lab", "uid": "1"}
    item["metadata"]["annotations"] = {"nvidia.com/dynamo-gang": "true"}
    rows = {row.type: row for row in desired(item, Observed(0.0)).status.conditions}
    assert (rows["Placed"].status, rows["Placed"].reason) == ("False", "NoSchedulingGates")
