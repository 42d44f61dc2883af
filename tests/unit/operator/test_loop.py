"""The operator's loop, against an API server: graphs become objects, and stay so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.kubernetes import MERGE
from tests.support.kubernetes_graphs import (
    ADAPTERS,
    DEPLOYMENTS,
    GRAPHS,
    GraphCluster,
    component,
    graph,
)

from dynamo.cli.kubernetes.status import print_status
from dynamo.core.tasks import run_all
from dynamo.operations.operator.pods import PodOptions

GRAPH = graph(component("Frontend", "frontend"), component("decode", "decode", 2))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    async with GraphCluster(tmp_path) as cluster:
        yield cluster


def writes(cluster: GraphCluster) -> list[str]:
    """Return the requests of the operator that write, without events."""
    return [
        line
        for line in cluster.server.requests
        if not line.startswith("GET") and "/events" not in line and "dryRun" not in line
    ]


async def test_a_graph_becomes_objects_and_is_ready(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful")
    names = {
        item["metadata"]["name"].rpartition("-")[0] for item in cluster.items("deployments.apps")
    }
    assert names == {"llm-frontend", "llm-decode"}
    assert len(cluster.items("pods")) == 3
    assert {item["metadata"]["name"] for item in cluster.items("services")} == {
        "llm-frontend", "llm-pods",
    }  # fmt: skip
    assert cluster.condition("Ready")[:2] == ("True", "all_resources_are_ready")
    parts = cluster.graph()["status"]["components"]
    assert parts["decode"]["readyReplicas"] == parts["decode"]["updatedReplicas"] == 2


async def test_an_operator_that_starts_again_writes_nothing(cluster: GraphCluster) -> None:
    loop = await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful" and loop.is_idle)
    await cluster.kill(loop)
    before = len(writes(cluster))
    version = cluster.server.store.version
    loop = await cluster.operator(PodOptions(image="dynamo:next", drain_s=99))
    await cluster.until(lambda: loop.is_idle)
    await asyncio.sleep(0.2)
    assert writes(cluster)[before:] == []
    assert cluster.server.store.version == version
    await cluster.apply(graph(component("Frontend", "frontend", 2), GRAPH["spec"]["components"][1]))
    await cluster.until(lambda: len(cluster.items("pods")) == 4)


async def test_what_others_change_is_put_right_and_their_own_stays(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful")
    (item,) = cluster.items("deployments.apps", **{"nvidia.com/dynamo-component": "decode"})
    name = item["metadata"]["name"]
    patch = {"metadata": {"annotations": {"mine": "1"}}, "spec": {"replicas": 5}}
    await cluster.client.send("PATCH", f"{DEPLOYMENTS}/{name}", patch, MERGE)

    def is_right() -> bool:
        (item,) = cluster.items("deployments.apps", **{"nvidia.com/dynamo-component": "decode"})
        return item["spec"]["replicas"] == 2 and item["metadata"]["annotations"]["mine"] == "1"

    await cluster.until(is_right)
    await cluster.client.send("DELETE", "/api/v1/namespaces/default/services/llm-frontend")
    await cluster.until(lambda: len(cluster.items("services")) == 2)


async def test_everything_goes_with_the_graph(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful")
    await cluster.client.send("DELETE", f"{GRAPHS}/llm")
    kinds = ("deployments.apps", "pods", "services", "secrets", "poddisruptionbudgets.policy")
    await cluster.until(lambda: not any(cluster.items(kind) for kind in kinds))
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful")


async def test_the_number_of_an_adapter_is_the_truth(cluster: GraphCluster) -> None:
    loop = await cluster.operator()
    item = graph(
        component("Frontend", "frontend"), component("decode", "decode", scalingAdapter={})
    )
    await cluster.apply(item)
    await cluster.until(lambda: cluster.state() == "successful")
    scale = f"{ADAPTERS}/llm-decode/scale"
    await cluster.client.send("PATCH", scale, {"spec": {"replicas": 3}}, MERGE)

    async def settled(count: int) -> None:
        await cluster.until(
            lambda: (
                cluster.state() == "successful"
                and cluster.graph()["spec"]["components"][1]["replicas"] == count
                and len(cluster.items("pods")) == count + 1
                and loop.is_idle
            )
        )

    await settled(3)
    shown = await cluster.client.get(scale)
    assert shown["status"]["replicas"] == 3
    selector = dict(part.split("=") for part in shown["status"]["selector"].split(","))
    assert len(cluster.items("pods", **selector)) == 3
    await cluster.apply(item)  # with its old number
    await settled(3)
    await cluster.until(
        lambda: any(row["reason"] == "ScalingAdapterWins" for row in cluster.items("events"))
    )


POD = "spec.components[0].podTemplate.spec"
WRONG = [
    ({"image": 3}, {}, f"{POD}.containers[0].image: expected `str`, got `int`"),
    ({"imagee": "x"}, {}, f"{POD}.containers[0].imagee: strict decoding error: unknown field"),
    ({}, {"restartPolicy": "No"}, f'{POD}.restartPolicy: Unsupported value: "No": supported'),
    (
        {"volumeMounts": [{"name": "disk", "mountPath": "/d"}]},
        {},
        f'{POD}.containers[0].volumeMounts[0].name: Not found: "disk"',
    ),
    (
        {"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}},
        {},
        f"{POD}.containers[0].resources.requests: Invalid value",
    ),
    (
        {"envFrom": [{"secretRef": {"name": "token"}}]},
        {},
        f"{POD}.containers[0].envFrom[0].secretRef.name: there is no Secret 'token'",
    ),
    (
        {},
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "disk"}}]},
        f"{POD}.volumes[0].persistentVolumeClaim.claimName: there is no PersistentVolumeClaim",
    ),
    (
        {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}}]},
        {},
        f"{POD}.containers[0].env[0].valueFrom.configMapKeyRef.name: there is no ConfigMap 'cm'",
    ),
    (
        {},
        {"serviceAccountName": "nobody"},
        f"{POD}.serviceAccountName: there is no ServiceAccount 'nobody'",
    ),
    (
        {"ports": [{"containerPort": 70000}]},
        {},
        f"{POD}.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and",
    ),
    (
        {},
        {"priorityClassName": "hgih"},
        f"{POD}.priorityClassName: there is no PriorityClass 'hgih'; did you mean 'high'?",
    ),
]


@pytest.mark.parametrize(("main", "pod", "text"), WRONG, ids=lambda value: str(value)[:30])
async def test_what_only_the_server_knows_is_told_by_field(
    cluster: GraphCluster, main: dict[str, object], pod: dict[str, object], text: str
) -> None:
    await cluster.client.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 9}
    )
    await cluster.operator()
    part = component("Frontend", "frontend")
    part["podTemplate"]["spec"] |= pod
    part["podTemplate"]["spec"]["containers"][0] |= main
    await cluster.apply(graph(part))
    await cluster.until(lambda: cluster.condition("SpecValid")[0] == "False")
    assert cluster.condition("SpecValid")[2].startswith(text)


async def test_a_missing_reference_that_comes_is_noticed(cluster: GraphCluster) -> None:
    await cluster.operator()
    part = component("Frontend", "frontend")
    part["podTemplate"]["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": "token"}}]
    await cluster.apply(graph(part))
    await cluster.until(lambda: cluster.condition("SpecValid")[1] == "ReferenceMissing")
    await cluster.client.create(
        "/api/v1/namespaces/default/secrets", {"metadata": {"name": "token"}}
    )
    await cluster.until(lambda: cluster.condition("SpecValid")[0] == "True")


async def test_two_graphs_whose_objects_have_one_name(cluster: GraphCluster) -> None:
    loop = await cluster.operator()
    await cluster.apply(graph(component("b-c", "worker", scalingAdapter={}), name="a"))
    await cluster.until(lambda: cluster.state("a") == "successful" and loop.is_idle)
    await cluster.apply(graph(component("c", "worker", scalingAdapter={}), name="a-b"))
    await cluster.until(lambda: cluster.state("a-b") == "failed" and loop.is_idle)
    text = "metadata.name: PodDisruptionBudget a-b-c is of the graph 'a'; rename this graph or its"
    assert cluster.condition("SpecValid", "a-b")[2].startswith(text)
    (adapter,) = cluster.items("dynamographdeploymentscalingadapters.nvidia.com")
    assert adapter["spec"]["dgdRef"]["name"] == "a"
    await cluster.delete("a")
    await cluster.until(lambda: cluster.state("a-b") == "successful")


async def test_a_wrong_label_of_pods_is_told(cluster: GraphCluster) -> None:
    await cluster.operator()
    part = component("Frontend", "frontend")
    part["podTemplate"]["metadata"] = {"labels": {"team": "a b"}}
    await cluster.apply(graph(part))
    await cluster.until(lambda: cluster.condition("SpecValid")[0] == "False")
    path = "spec.components[0].podTemplate.metadata.labels"
    assert cluster.condition("SpecValid")[2].startswith(f'{path}: Invalid value: "a b": a valid')


async def test_an_unknown_priority_class_of_a_graph_is_told(cluster: GraphCluster) -> None:
    await cluster.operator()
    await cluster.apply(graph(component("Frontend", "frontend"), priorityClassName="high"))
    await cluster.until(lambda: cluster.condition("SpecValid")[1] == "ReferenceMissing")
    text = "spec.priorityClassName: there is no PriorityClass 'high'; there are none"
    assert cluster.condition("SpecValid")[2] == text


async def test_the_least_busy_pods_leave_first(cluster: GraphCluster) -> None:
    async def read_load(pod: Mapping[str, Any]) -> float | None:
        return 0.0 if pod["metadata"]["name"] in idle else 5.0

    idle: set[str] = set()
    await cluster.operator(read_load=read_load)
    item = graph(component("Frontend", "frontend"), component("decode", "decode", 4))
    await cluster.apply(item)
    await cluster.until(lambda: cluster.state() == "successful")
    label = {"nvidia.com/dynamo-component": "decode"}
    names = [pod["metadata"]["name"] for pod in cluster.items("pods", **label)]
    idle |= {names[1], names[2]}
    item["spec"]["components"][1]["replicas"] = 2
    await cluster.apply(item)
    await cluster.until(lambda: cluster.state() == "successful")
    left = {pod["metadata"]["name"] for pod in cluster.items("pods", **label)}
    assert left == set(names) - idle


async def test_two_managers_of_an_adapter_are_named(cluster: GraphCluster) -> None:
    loop = await cluster.operator()
    part = component("decode", "decode", scalingAdapter={})
    await cluster.apply(graph(component("Frontend", "frontend"), part))
    await cluster.until(lambda: cluster.state() == "successful")
    for number, manager in enumerate(("hpa", "planner", "hpa")):
        await cluster.client.send(
            "PATCH", f"{ADAPTERS}/llm-decode/scale", {"spec": {"replicas": 2 + number}}, MERGE,
            fieldManager=manager,
        )  # fmt: skip
        await cluster.until(
            lambda: (
                cluster.graph()["spec"]["components"][1]["replicas"] == 2 + number  # noqa: B023
                and loop.is_idle
            )
        )
    await cluster.until(lambda: cluster.condition("ScalingConflict")[0] == "True")
    assert cluster.condition("ScalingConflict")[2] == "llm-decode: hpa and planner scale it in turn"


async def test_many_writers_of_one_graph(cluster: GraphCluster) -> None:
    loop = await cluster.operator()
    await cluster.apply(GRAPH)
    await cluster.until(lambda: cluster.state() == "successful" and loop.is_idle)
    before = len(writes(cluster))

    async def write(number: int) -> None:
        for count in range(50):
            labels = {f"team-{number}": str(count)}
            patch = {"metadata": {"labels": labels}, "spec": {"labels": labels}}
            await cluster.client.send("PATCH", f"{GRAPHS}/llm", patch, MERGE)

    await run_all(*map(write, range(20)))
    wanted = {f"team-{number}": "49" for number in range(20)}
    await cluster.until(
        lambda: (
            cluster.state() == "successful"
            and loop.is_idle
            and all(
                wanted.items() <= item["spec"]["template"]["metadata"]["labels"].items()
                for item in cluster.items("deployments.apps")
            )
        )
    )
    assert cluster.graph()["metadata"]["labels"] == wanted
    assert len(writes(cluster)) - before <= 20 * 50 * (1 + 3)


async def test_an_api_server_that_was_away_and_one_of_an_older_backup(
    cluster: GraphCluster,
) -> None:
    loop = await cluster.operator()
    item = graph(component("Frontend", "frontend"), component("decode", "decode", 1))
    await cluster.apply(item)
    await cluster.until(lambda: cluster.state() == "successful" and loop.is_idle)
    backup = cluster.server.store.backup()
    item["spec"]["components"][1]["replicas"] = 3
    await cluster.apply(item)
    await cluster.until(lambda: cluster.state() == "successful" and loop.is_idle)
    await cluster.server.stop()
    await asyncio.sleep(0.2)
    await cluster.server.start()
    cluster.server.cut_watches()
    item["spec"]["components"][1]["replicas"] = 2
    await cluster.apply(item)
    label = {"nvidia.com/dynamo-component": "decode"}
    await cluster.until(
        lambda: cluster.state() == "successful" and len(cluster.items("pods", **label)) == 2
    )
    await cluster.server.restore(backup)
    await cluster.until(lambda: cluster.graph()["spec"]["components"][1]["replicas"] == 1)
    item["spec"]["components"][1]["replicas"] = 4
    await cluster.apply(item)
    await cluster.until(
        lambda: cluster.state() == "successful" and len(cluster.items("pods", **label)) == 4
    )


async def test_the_status_command_says_what_does_not_serve(
    cluster: GraphCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.operator()
    cluster.pods.unready.add("bad:1")
    await cluster.apply(
        graph(component("Frontend", "frontend"), component("d", "decode", 2, "bad:1"))
    )
    await cluster.until(
        lambda: (
            cluster.condition("Ready")[2] == "d: 0 of 2 ready"
            and cluster.graph()["status"]["components"]["d"].get("updatedReplicas") == 2
        )
    )
    for name, value in cluster.account().items():
        monkeypatch.setenv(name, value)
    assert await asyncio.to_thread(print_status, "default") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "default/llm: pending"
    assert "  d: 0 of 2 ready, 2 of the present manifest" in lines
    assert lines[-2:] == ["  Ready: pods_not_ready", "    d: 0 of 2 ready"]
    assert await asyncio.to_thread(print_status, "lab") == 0
    assert capsys.readouterr().out == "no graphs in lab\n"
    (refused,) = cluster.server.access.refused  # the command asks with the rights of its user
    assert refused.startswith('namespaces "lab" is forbidden')
    cluster.server.access.refused.clear()
