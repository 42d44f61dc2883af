"""PodCliqueSets and LeaderWorkerSets: valid by the schemas of these kinds, and by what their
webhooks check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.kubernetes_graphs import component, graph

from dynamo.operations.operator.desired import desired
from dynamo.operations.operator.view import Observed
from dynamo.operations.operator.workloads import GROVE, LEADER_WORKER
from dynamo.testing.kubernetes.kinds import BUILT_IN
from dynamo.testing.kubernetes.published import published_schema
from dynamo.testing.kubernetes.rules import check
from dynamo.testing.kubernetes.schema import prune, validate

SCHEMAS = Path(__file__).parents[2] / "data" / "kubernetes" / "crds"
COMBINED_NAMES = 45
"""Characters of the names of a PodCliqueSet, a scaling group and a clique together."""


def schema_of(kind: str) -> dict[str, Any]:
    """Return the schema of a kind, with that of pods in it."""
    schema: dict[str, Any] = yaml.safe_load((SCHEMAS / f"{kind.lower()}s.yaml").read_text())
    pods = next(kind for kind in BUILT_IN if kind.name == "Pod")
    pod = published_schema(pods, "v1")
    assert pod is not None
    template = schema["properties"]["spec"]["properties"]
    if kind == "PodCliqueSet":
        clique = template["template"]["properties"]["cliques"]["items"]["properties"]["spec"]
        clique["properties"]["podSpec"] = pod["properties"]["spec"]
    else:
        for part in ("leaderTemplate", "workerTemplate"):
            place = template["leaderWorkerTemplate"]["properties"][part]["properties"]
            place["spec"] = pod["properties"]["spec"]
    return schema


def problems(item: dict[str, Any]) -> list[str]:
    """Return what the API server of a cluster with this kind refuses or drops."""
    schema = schema_of(item["kind"])
    dropped: list[str] = []
    prune(schema, item, "", dropped, root=True)
    wrong = [*validate(schema, item, ""), *check(schema, item, None, "")]
    return [*dropped, *(field.text for field in wrong)]


def workload(group: str, name: str = "llm", **more: Any) -> dict[str, Any]:
    """Return the workload of a component of several nodes."""
    part = component("Decode", "decode", **{"multinode": {"nodeCount": 2}, **more})
    part["podTemplate"]["metadata"] = {"labels": {"team": "x"}, "annotations": {"a": "1"}}
    item = graph(component("Frontend", "frontend"), part, name=name, env=[{"name": "A"}])
    item["metadata"] |= {"namespace": "lab", "uid": "1"}
    result = desired(item, Observed(0.0, groups=frozenset({group}), secret=b"x"))
    assert result.check.problems == []
    (replica_set,) = (child for child in result.objects if child["apiVersion"].startswith(group))
    return replica_set


@pytest.mark.parametrize("group", [GROVE, LEADER_WORKER])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"replicas": 3, "minAvailable": 2},
        {"multinode": {"nodeCount": 8}, "sharedMemorySize": "1Gi"},
        {"compilationCache": {"pvcName": "kernels"}},
    ],
    ids=str,
)
def test_replicas_of_several_nodes_are_valid(group: str, more: dict[str, Any]) -> None:
    assert problems(workload(group, **more)) == []


@pytest.mark.parametrize("group", [GROVE, LEADER_WORKER])
def test_a_wrong_field_is_found(group: str) -> None:
    item = workload(group)
    item["spec"]["replica"] = 1
    item["spec"]["replicas"] = "1"
    unknown, wrong = problems(item)
    assert unknown == "spec.replica"
    assert wrong.startswith('spec.replicas: Invalid value: "string": spec.replicas in body must be')


@pytest.mark.parametrize("name", ["llm", "a-graph-with-a-rather-long-name-of-its-own"])
@pytest.mark.parametrize("replicas", [1, 5])
def test_a_clique_set_passes_the_webhook(name: str, replicas: int) -> None:
    item = workload(GROVE, name, replicas=replicas, minAvailable=1)
    template = item["spec"]["template"]
    (group,) = template["podCliqueScalingGroups"]
    assert 0 < group["minAvailable"] <= group["replicas"] == replicas
    roles = [clique["spec"]["roleName"] for clique in template["cliques"]]
    assert len(set(roles)) == len(roles)
    assert [clique["name"] for clique in template["cliques"]] == group["cliqueNames"]
    for clique in template["cliques"]:
        names = item["metadata"]["name"] + group["name"] + clique["name"]
        assert len(names) <= COMBINED_NAMES
        assert 0 < clique["spec"]["minAvailable"] <= clique["spec"]["replicas"]
        assert "topologySpreadConstraints" not in clique["spec"]["podSpec"]
