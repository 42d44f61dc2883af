"""Graphs of both versions: their upgrade, and what is said of wrong ones."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dynamo.operations.operator.manifests import read_manifests
from dynamo.operations.operator.rules import check_graph, references

EXAMPLES = sorted((Path(__file__).parents[2] / "data" / "kubernetes").glob("*.yaml"))

GRAPH: dict[str, Any] = {
    "components": [
        {"name": "Frontend", "type": "frontend"},
        {
            "name": "decode",
            "type": "decode",
            "replicas": 2,
            "podTemplate": {
                "spec": {"containers": [{"name": "main", "image": "dynamo:latest-vllm"}]}
            },
        },
    ]
}
SERVICES: dict[str, Any] = {
    "services": {
        "Frontend": {"componentType": "frontend"},
        "Decode": {"componentType": "worker", "subComponentType": "decode", "replicas": 2},
    }
}


def changed(graph: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a graph with another value at a path of dots."""
    result = deepcopy(graph)
    place: Any = result
    *parents, last = (int(word) if word.isdigit() else word for word in path.split("/"))
    for word in parents:
        place = place.setdefault(word, {}) if isinstance(place, dict) else place[word]
    place[last] = value
    return result


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_of_the_peer_are_valid(path: Path) -> None:
    (graph,) = read_manifests(path.read_text(), path.name)
    check = check_graph(graph["spec"])
    assert check.spec is not None
    assert not check.problems
    planner = "planner scales workers with `scalingAdapter"
    assert [planner in note.text for note in check.notes] == [True] * ("planner" in path.stem)
    kinds = {component.type for component in check.spec.components}
    assert "frontend" in kinds
    assert kinds & {"worker", "decode"}


C0, C1, S = "components/0", "components/1", "services/Decode"
MAIN = f"{C1}/podTemplate/spec/containers/0"
POD = "spec.components[1].podTemplate.spec"
WRONG = [
    # exactly one form
    (GRAPH, "services", {}, "spec: exactly one of components (v1beta1) and services (v1alpha1)"),
    ({}, "env", [], "spec: exactly one of components (v1beta1) and services (v1alpha1)"),
    # types and bounds
    (GRAPH, "components", {}, "spec.components: expected `array`, got `object`"),
    (GRAPH, f"{C1}/replicas", "2", "spec.components[1].replicas: expected `int`, got `str`"),
    (GRAPH, f"{C1}/replicas", -1, "spec.components[1].replicas: expected `int` >= 0"),
    (GRAPH, f"{C1}/minAvailable", 0, "spec.components[1].minAvailable: expected `int` >= 1"),
    (GRAPH, f"{C1}/multinode", {"nodeCount": 1}, "multinode.nodeCount: expected `int` >= 2"),
    (GRAPH, f"{C1}/multinode", {}, "spec.components[1].multinode: object missing required field"),
    (GRAPH, f"{C1}/podTemplate", [], "spec.components[1].podTemplate: expected `object`"),
    (GRAPH, f"{C1}/scalingAdapter", True, "spec.components[1].scalingAdapter: expected"),
    (GRAPH, f"{C1}/compilationCache", {}, "compilationCache: object missing required field `pvc"),
    (GRAPH, "env", "A=1", "spec.env: expected `array`, got `str`"),
    (GRAPH, "labels", {"a": 1}, "spec.labels[...]: expected `str`, got `int`"),
    (GRAPH, "restart", {"id": ""}, "spec.restart.id: expected `str` of length >= 1"),
    (
        GRAPH,
        "components",
        [{"name": "a"}] * 26,
        "spec.components: expected `array` of length <= 25",
    ),
    # choices and patterns
    (
        GRAPH,
        f"{C1}/type",
        "decoder",
        "spec.components[1].type: invalid enum value 'decoder'; did you mean 'decode'?",
    ),
    (
        GRAPH,
        "backendFramework",
        "tgi",
        "invalid enum value 'tgi'; known: sglang, vllm, trtllm, native, mock",
    ),
    (GRAPH, f"{C1}/name", "de_code", "spec.components[1].name: expected `str` matching regex"),
    (GRAPH, f"{C1}/name", "x" * 64, "spec.components[1].name: expected `str` of length <= 63"),
    (
        GRAPH,
        "restart",
        {"id": "1", "strategy": {"type": "Random"}},
        "spec.restart.strategy.type: invalid enum value 'Random'; known: Sequential, Parallel",
    ),
    # pod templates and services
    (GRAPH, f"{C1}/podTemplate/spec", 5, "spec.components[1].podTemplate.spec: expected `object`"),
    (GRAPH, f"{MAIN}/env", ["A=1"], f"{POD}.containers[0].env[0]: expected `object`, got `str`"),
    (GRAPH, f"{MAIN}/env", [{"name": "A", "value": 1}], f"{POD}.containers[0].env[0].value: exp"),
    (GRAPH, f"{MAIN}/args", "--model x", f"{POD}.containers[0].args: expected `array`, got `str`"),
    (GRAPH, f"{MAIN}/resources", "big", f"{POD}.containers[0].resources: expected `object`, got"),
    (GRAPH, f"{MAIN}/livenessProbe", "x", f"{POD}.containers[0].livenessProbe: expected `object`"),
    (GRAPH, "env", [{"nam": "A"}], "spec.env[0]: object missing required field `name`"),
    (SERVICES, f"{S}/volumeMounts", ["w"], "spec.services.Decode.volumeMounts[0]: expected `obj"),
    (SERVICES, f"{S}/extraPodSpec", "x", "spec.services.Decode.extraPodSpec: expected `object`"),
    # quantities
    (
        GRAPH,
        f"{C1}/sharedMemorySize",
        "8GB",
        "spec.components[1].sharedMemorySize: '8GB' is no qua",
    ),
    (
        GRAPH,
        f"{C1}/sharedMemorySize",
        "-1",
        "spec.components[1].sharedMemorySize: '-1' is negative",
    ),
    (
        GRAPH,
        f"{MAIN}/resources",
        {"limits": {"nvidia.com/gpu": "two"}},
        "spec.components[1].podTemplate.spec.containers[0].resources.limits[nvidia.com/gpu]: 'two'",
    ),
    # rules that CEL has, too
    (GRAPH, f"{C0}/name", "DECODE", "spec.components[1].name: 'decode' differs from 'DECODE' in"),
    (GRAPH, f"{C1}/minAvailable", 3, "minAvailable: 3 must not exceed the 2 replicas, unless"),
    (GRAPH, f"{C1}/eppConfig", {}, "spec.components[1].eppConfig: may only be set with the type e"),
    (
        {"components": [{"name": "a", "type": "epp"}, {"name": "b", "type": "frontend"}]},
        f"{C1}/type",
        "epp",
        "spec.components[1].type: at most one component may have the type epp",
    ),
    # domains
    (
        GRAPH,
        f"{C1}/topologyConstraint",
        {},
        "topologyConstraint.packDomain: is missing; a label of nodes, or zone, block, rack, host",
    ),
    (
        GRAPH,
        "topologyConstraint",
        {"packDomain": ""},
        "spec.topologyConstraint.packDomain: is missing; a label of nodes, or zone, bl",
    ),
    (
        SERVICES,
        f"{S}/topologyConstraint",
        {"packDomain": ""},
        "spec.services.Decode.topologyConstraint.packDomain: is missing; a label of nodes",
    ),
    # names
    (GRAPH, "componets", [], "spec.componets: unknown field; did you mean 'components'?"),
    (
        GRAPH,
        f"{C1}/replica",
        2,
        "spec.components[1].replica: unknown field; did you mean 'replicas",
    ),
    (
        GRAPH,
        f"{MAIN}/name",
        "mian",
        "spec.components[1].podTemplate.spec.containers: none is named main, which is the compo",
    ),
    (
        GRAPH,
        "restart",
        {"id": "1", "strategy": {"order": ["Decode"]}},
        "spec.restart.strategy.order[0]: no component is named 'Decode'; did you mean 'decode'?",
    ),
    (
        GRAPH,
        f"{C1}/podTemplate/spec/containers",
        {},
        "spec.components[1].podTemplate.spec.containers: expected `array`, got `object`",
    ),
    # services
    (SERVICES, f"{S}/replicas", "2", "spec.services.Decode.replicas: expected `int`, got `str`"),
    (
        SERVICES,
        f"{S}/componentTyp",
        "x",
        "spec.services.Decode.componentTyp: unknown field; did yo",
    ),
    (SERVICES, f"{S}/componentType", "decoder", "spec.services.Decode.componentType: invalid enum"),
    (SERVICES, f"{S}/envs", {}, "spec.services.Decode.envs: expected `array`, got `object`"),
    (
        SERVICES,
        f"{S}/envFromSecret",
        [],
        "spec.services.Decode.envFromSecret: expected `str`, got `array`",
    ),
    (
        SERVICES,
        f"{S}/resources/limits/gpu",
        "x",
        "spec.services.Decode.resources.limits.gpu: 'x' i",
    ),
    (
        SERVICES,
        f"{S}/resources/limits/gpus",
        "1",
        "Decode.resources.limits.gpus: unknown field; di",
    ),
    (SERVICES, f"{S}/resources/limits/tpu", "1", "Decode.resources.limits.tpu: unknown field; d"),
    (SERVICES, f"{S}/sharedMemory/size", "8GB", "spec.services.Decode.sharedMemory.size: '8GB' is"),
    (SERVICES, f"{S}/multinode", {"nodeCount": 1}, "spec.services.Decode.multinode.nodeCount: exp"),
    (
        SERVICES,
        f"{S}/volumeMounts",
        [{"name": "weights"}],
        "spec.services.Decode.volumeMounts[0].mountPoint: is missing",
    ),
    (
        SERVICES,
        f"{S}/extraPodSpec/mainContainer/resources/limits/memory",
        "many",
        "spec.services.Decode.extraPodSpec.mainContainer.resources.limits[memory]: 'many' is no",
    ),
]


@pytest.mark.parametrize(("graph", "path", "value", "text"), WRONG)
def test_a_wrong_graph_is_refused_by_field(
    graph: dict[str, Any], path: str, value: Any, text: str
) -> None:
    problems = [str(problem) for problem in check_graph(changed(graph, path, value)).problems]
    assert len(problems) == 1
    assert text in problems[0]


@pytest.mark.parametrize(
    ("graph", "path", "value", "note"),
    [
        (GRAPH, f"{C1}/modelRef", {"name": "m"}, "spec.components[1].modelRef: no effect: the w"),
        (GRAPH, f"{C1}/experimental", {"x": 1}, "spec.components[1].experimental: no effect"),
        (GRAPH, "providerOverride", {"x": 1}, "spec.providerOverride: no effect"),
        (GRAPH, f"{C0}/type", "epp", "spec.components[0].type: no pods: there is no endpoint pic"),
        (SERVICES, f"{S}/ingress", {"enabled": True}, "spec.services.Decode.ingress: no effect: m"),
        (SERVICES, f"{S}/autoscaling", {}, "spec.services.Decode.autoscaling: no effect: use sca"),
        (
            GRAPH,
            f"{C0}/type",
            "planner",
            "spec.components[0].type: no effect: a planner scales workers with `scalingAdapter: {}",
        ),
        (
            SERVICES,
            "services/Frontend/componentType",
            "planner",
            "spec.services.Frontend.componentType: no effect: a planner scales workers with `scal",
        ),
        (
            SERVICES,
            f"{S}/subComponentType",
            "decoder",
            "spec.services.Decode.subComponentType: no effect: 'decoder' with componentType 'work",
        ),
        (
            GRAPH,
            "topologyConstraint",
            {"clusterTopologyName": "dgx", "packDomain": "rack"},
            "spec.topologyConstraint.clusterTopologyName: no effect: packDomain is a label of nod",
        ),
        (
            changed(GRAPH, f"{C1}/multinode", {"nodeCount": 2}),
            f"{C1}/topologyConstraint",
            {"packDomain": "rack"},
            "spec.components[1].topologyConstraint: no effect: Grove or LeaderWorkerSet places r",
        ),
        (SERVICES, "pvcs", [{"name": "w", "create": True}], "spec.pvcs[0].create: claims are not"),
    ],
)
def test_fields_without_effect_are_said(
    graph: dict[str, Any], path: str, value: Any, note: str
) -> None:
    check = check_graph(changed(graph, path, value))
    assert not check.problems
    (only,) = map(str, check.notes)
    assert only.startswith(note)


def test_a_claim_that_a_service_mounts_has_its_path() -> None:
    mounts = [{"name": "w", "mountPoint": "/w"}]
    check = check_graph(changed(SERVICES, f"{S}/volumeMounts", mounts))
    (reference,) = references(check)
    assert (reference.name, reference.path) == ("w", "spec.services.Decode.volumeMounts[0].name")


def test_references_have_their_paths() -> None:
    pod = {
        "serviceAccountName": "runner",
        "volumes": [
            {"name": "a", "secret": {"secretName": "keys"}},
            {"name": "b", "configMap": {"name": "conf"}},
            {"name": "c", "persistentVolumeClaim": {"claimName": "weights"}},
            {"name": "d", "configMap": {"name": "maybe", "optional": True}},
        ],
        "containers": [
            {
                "name": "main",
                "envFrom": [{"secretRef": {"name": "token"}}, {"configMapRef": {"name": "more"}}],
                "env": [
                    {"name": "K", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}},
                    {
                        "name": "O",
                        "valueFrom": {
                            "secretKeyRef": {"name": "other", "key": "k", "optional": True}
                        },
                    },
                ],
            }
        ],
    }
    graph = changed(GRAPH, f"{C1}/podTemplate/spec", pod)
    graph["components"][1]["compilationCache"] = {"pvcName": "kernels"}
    base = "spec.components[1].podTemplate.spec"
    rows = [(row.kind, row.name, row.path) for row in references(check_graph(graph))]
    assert rows == [
        ("ServiceAccount", "runner", f"{base}.serviceAccountName"),
        ("Secret", "keys", f"{base}.volumes[0].secret.secretName"),
        ("ConfigMap", "conf", f"{base}.volumes[1].configMap.name"),
        ("PersistentVolumeClaim", "weights", f"{base}.volumes[2].persistentVolumeClaim.claimName"),
        ("Secret", "token", f"{base}.containers[0].envFrom[0].secretRef.name"),
        ("ConfigMap", "more", f"{base}.containers[0].envFrom[1].configMapRef.name"),
        ("Secret", "key", f"{base}.containers[0].env[0].valueFrom.secretKeyRef.name"),
        ("PersistentVolumeClaim", "kernels", "spec.components[1].compilationCache.pvcName"),
    ]
    graph = changed(SERVICES, f"{S}/envFromSecret", "token")
    (row,) = references(check_graph(graph))
    assert (row.name, row.path) == ("token", "spec.services.Decode.envFromSecret")
