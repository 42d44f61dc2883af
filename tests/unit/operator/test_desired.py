"""The objects that become of graphs: names, labels, defaults, what the user wrote, versions."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from dynamo.operations.operator.desired import desired
from dynamo.operations.operator.manifests import read_manifests
from dynamo.operations.operator.merge import merge, own_path
from dynamo.operations.operator.pods import PodOptions
from dynamo.operations.operator.rules import references
from dynamo.operations.operator.view import Desired, Observed
from dynamo.operations.operator.workloads import GROVE, LEADER_WORKER, WORKLOADS

EXAMPLES = sorted((Path(__file__).parents[2] / "data" / "kubernetes").glob("*.yaml"))
SCHEMAS = ("1.30", "1.37")
FOREIGN = (GROVE, LEADER_WORKER, "nvidia.com")
UID = "6f1c0c55-0d0f-4f0e-9a57-0d7c2e3a7b11"


def graph(*components: dict[str, Any], name: str = "llm", **spec: Any) -> dict[str, Any]:
    """Return a graph of the namespace `lab`."""
    metadata = {"name": name, "namespace": "lab", "uid": UID, "generation": 1}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata,
        "spec": {"components": list(components), **spec},
    }


def component(
    name: str, kind: str, main: Any = None, pod: Any = None, **more: Any
) -> dict[str, Any]:
    """Return a component whose container `main` has these fields."""
    containers = [{"name": "main", **main}] if main else []
    spec = {**(pod or {}), **({"containers": containers} if containers else {})}
    template = {"podTemplate": {"spec": spec}} if spec else {}
    return {"name": name, "type": kind, **template, **more}


def make(item: dict[str, Any], *groups: str, **observed: Any) -> Desired:
    """Return what is desired in a cluster with these API groups."""
    return desired(item, Observed(1e9, groups=frozenset(groups), secret=b"s" * 32, **observed))


def by_key(result: Desired) -> dict[str, dict[str, Any]]:
    """Return the objects by kind and name."""
    return {f"{item['kind']} {item['metadata']['name']}": item for item in result.objects}


def workload(result: Desired, name: str) -> dict[str, Any]:
    """Return the workload of a component."""
    label = "nvidia.com/dynamo-component"
    return next(
        item
        for item in result.objects
        if item["metadata"]["labels"].get(label) == name and item["kind"] in WORKLOADS
    )


def main_of(result: Desired, name: str) -> dict[str, Any]:
    """Return the container `main` of a component's Deployment."""
    containers = workload(result, name)["spec"]["template"]["spec"]["containers"]
    return next(box for box in containers if box["name"] == "main")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("groups", [(GROVE,), (LEADER_WORKER,)], ids=["grove", "lws"])
def test_manifests_of_the_peer_become_valid_objects(path: Path, groups: tuple[str, ...]) -> None:
    (item,) = read_manifests(path.read_text().replace("${VERSION}", "1.3.1"), path.name)
    item["metadata"] |= {"namespace": "lab", "uid": UID}
    result = make(item, *groups)
    names = by_key(result)
    name = item["metadata"]["name"]
    for part in result.check.spec.components:  # type: ignore[union-attr]
        lower = part.name.lower()
        item = workload(result, lower)
        key = f"{item['kind']} {item['metadata']['name']}"
        assert f" {name}-{lower}-" in key
        kind, generation = key.split()[0], key.rpartition("-")[2]
        many = "PodCliqueSet" if GROVE in groups else "LeaderWorkerSet"
        assert kind == (many if part.multinode else "Deployment")
        assert names[key]["metadata"]["labels"]["nvidia.com/dynamo-worker-hash"] == generation
        assert f"PodDisruptionBudget {name}-{lower}" in names
    account = f"{name}-k8s-service-discovery"
    assert {
        f"Secret {name}-planes", f"ServiceAccount {account}", f"Role {account}-role",
        f"RoleBinding {account}-binding", f"Service {name}-pods", f"Service {name}-frontend",
        f"NetworkPolicy {name}",
    } <= names.keys()  # fmt: skip
    for child in result.objects:
        assert child["metadata"]["ownerReferences"][0]["uid"] == UID
        if child["apiVersion"].partition("/")[0] not in FOREIGN:
            for version in SCHEMAS:
                kubernetes_validate.validate(child, version, strict=True)


def test_the_example_is_valid_and_has_no_field_without_effect() -> None:
    path = Path(__file__).parents[3] / "examples" / "kubernetes" / "mock.yaml"
    (item,) = read_manifests(path.read_text(), path.name)
    item["metadata"] |= {"namespace": "lab", "uid": UID}
    (condition, *_) = make(item).status.conditions
    assert (condition.type, condition.status, condition.reason) == ("SpecValid", "True", "Valid")


def test_defaults_of_a_frontend_and_of_a_worker() -> None:
    result = make(graph(component("Frontend", "frontend"), component("decode", "decode")))
    front, work = main_of(result, "frontend"), main_of(result, "decode")
    assert front["command"] == ["python3", "-m", "dynamo.frontend"]
    assert work["command"] == ["dynamo", "run", "in=none", "--decode-workers", "1"]
    assert [port["containerPort"] for port in front["ports"]] == [8000, 9090]
    assert [port["containerPort"] for port in work["ports"]] == [9090]
    assert front["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000}
    assert work["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9090}
    assert {work[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {
        "/live"
    }
    values = {row["name"]: row.get("value") or row["valueFrom"] for row in work["env"]}
    generation = workload(result, "decode")["metadata"]["name"].rpartition("-")[2]
    assert values["DYNAMO_RUNTIME__NAMESPACE"] == f"lab-llm-{generation}"
    assert values["DYNAMO_RUNTIME__DISCOVERY"] == "kubernetes:"
    assert values["DYNAMO_SECURITY__SECRET"] == {
        "secretKeyRef": {"name": "llm-planes", "key": "secret"}
    }
    assert values["POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    pod = workload(result, "decode")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45
    assert {"name": "dynamo-shm", "mountPath": "/dev/shm"} in work["volumeMounts"]
    for box in (front, work):
        assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not box["securityContext"]["allowPrivilegeEscalation"]


def test_a_planner_scales_its_graph_with_an_account_of_its_own() -> None:
    result = make(graph(component("Planner", "planner"), component("w", "worker")))
    values = {row["name"]: row.get("value") for row in main_of(result, "planner")["env"]}
    assert values["DYNAMO_PLANNER__CONNECTOR"] == "kubernetes"
    pod = workload(result, "planner")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "llm-planner"
    rules = by_key(result)["Role llm-planner-role"]["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch", "patch"}
    binding = by_key(result)["RoleBinding llm-k8s-service-discovery-binding"]
    assert "llm-planner" in [subject["name"] for subject in binding["subjects"]]


def test_users_win_over_defaults_by_name() -> None:
    main = {
        "image": "worker:1",
        "args": ["--drain", "60"],
        "env": [{"name": "POD_NAME", "value": "mine"}, {"name": "B", "value": "2"}],
        "ports": [{"name": "status", "containerPort": 7000}],
        "readinessProbe": {"exec": {"command": ["true"]}},
        "livenessProbe": None,
        "securityContext": {"readOnlyRootFilesystem": False},
        "volumeMounts": [{"name": "fast", "mountPath": "/dev/shm"}],
    }
    pod = {
        "serviceAccountName": "mine",
        "volumes": [{"name": "fast", "emptyDir": {}}],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    }
    item = graph(component("w", "worker", main, pod), env=[{"name": "A", "value": "1"}])
    result = make(item)
    box = main_of(result, "w")
    assert "command" not in box
    assert {row["name"]: row.get("value") for row in box["env"]} | {
        "POD_NAME": "mine", "A": "1", "B": "2",
    } == {row["name"]: row.get("value") for row in box["env"]}  # fmt: skip
    assert box["ports"] == [{"name": "status", "containerPort": 7000}]
    assert box["readinessProbe"] == {"exec": {"command": ["true"]}}
    assert "livenessProbe" not in box
    assert box["securityContext"]["readOnlyRootFilesystem"] is False
    assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [row["name"] for row in box["volumeMounts"] if row["mountPath"] == "/dev/shm"] == [
        "fast"
    ]
    spec = workload(result, "w")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "mine"
    assert spec["terminationGracePeriodSeconds"] == 75
    assert spec["initContainers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    binding = by_key(result)["RoleBinding llm-k8s-service-discovery-binding"]
    assert "mine" in [subject["name"] for subject in binding["subjects"]]


def test_paths_lead_back_to_what_the_user_wrote() -> None:
    defaults = {"containers": [{"name": "main", "env": [{"name": "A"}, {"name": "B"}]}]}
    own = {
        "containers": [{"name": "side"}, {"name": "main", "env": [{"name": "C"}, {"name": "A"}]}]
    }
    merged = merge(defaults, own)
    for number, row in enumerate(merged["containers"][1]["env"]):
        path = own_path(f"containers[1].env[{number}].name", merged, own)
        wanted = {"A": "containers[1].env[1].name", "C": "containers[1].env[0].name", "B": None}
        assert path == wanted[row["name"]]


def test_long_names_are_cut_and_stay_apart() -> None:
    parts = [component(f"{'worker' * 9}{number}", "worker") for number in range(2)]
    result = make(graph(component("Frontend", "frontend"), *parts, name="g" * 60))
    names = [item["metadata"]["name"] for item in result.objects if item["kind"] == "Deployment"]
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 63
    for item in result.objects:
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())


def test_the_hash_is_of_what_workers_are() -> None:
    base = graph(component("Frontend", "frontend"), component("decode", "decode", {"image": "w:1"}))

    def generation(**changes: Any) -> str:
        item = deepcopy(base)
        item["spec"]["components"][1] |= changes
        item["spec"]["components"][0]["replicas"] = 7
        result = make(item)
        return str(
            workload(result, "decode")["metadata"]["labels"]["nvidia.com/dynamo-worker-hash"]
        )

    first = generation()
    assert generation(replicas=5, scalingAdapter={}, minAvailable=1) == first
    other = component("decode", "decode", {"image": "w:2"})
    assert generation(podTemplate=other["podTemplate"]) != first
    labelled = deepcopy(base["spec"]["components"][1]["podTemplate"])
    labelled["metadata"] = {"labels": {"team": "x"}}
    assert generation(podTemplate=labelled) == first


def test_replicas_of_several_nodes_need_a_kind_for_them() -> None:
    item = graph(component("w", "worker", multinode={"nodeCount": 2}))
    result = make(item)
    ready = {row.type: row for row in result.status.conditions}["Ready"]
    assert (ready.status, ready.reason) == ("False", "MultinodeNeedsGroveOrLWS")
    assert not [child for child in result.objects if child["kind"] == "Deployment"]
    item["metadata"]["annotations"] = {"nvidia.com/enable-grove": "false"}
    kinds = {child["kind"] for child in make(item, GROVE, LEADER_WORKER).objects}
    assert "LeaderWorkerSet" in kinds
    assert "PodCliqueSet" not in kinds


def test_new_defaults_of_an_operator_roll_nothing() -> None:
    item = graph(component("Frontend", "frontend"), component("decode", "decode"))
    old = make(item)
    live = {(child["kind"], child["metadata"]["name"]): child for child in old.objects}
    observed = Observed(1e9, live)
    newer = PodOptions(image="dynamo:next", drain_s=90)
    for name in ("frontend", "decode"):
        again = desired(item, observed, newer)
        assert workload(again, name) == workload(old, name)
    changed = deepcopy(item)
    changed["spec"]["components"][0] |= component("Frontend", "frontend", {"args": ["x"]})
    again = desired(changed, observed, newer)
    assert main_of(again, "frontend")["image"] == "dynamo:next"
    assert workload(again, "decode") == workload(old, "decode")
    changed["spec"]["components"][1] |= component("decode", "decode", {"args": ["x"]})
    assert main_of(desired(changed, observed, newer), "decode")["image"] == "dynamo:next"


def test_wrong_graphs_change_nothing() -> None:
    item = graph(component("decode", "decode", replicas=1, minAvailable=2))
    result = make(item)
    conditions = {row.type: row for row in result.status.conditions}
    assert not result.objects
    assert result.status.state == "failed"
    assert conditions["SpecValid"].status == "False"
    assert conditions["SpecValid"].message.startswith("spec.components[0].minAvailable: 2 must not")
    assert conditions["Ready"].status == "False"


def container(**fields: Any) -> dict[str, Any]:
    """Return a container with what the operator reads."""
    names = {"secretRef": {"name": "a"}}, {"configMapRef": {"name": "b"}}
    value = {"secretKeyRef": {"name": "c", "key": "k"}}
    return {
        "command": ["python3", "-m", "dynamo.mocker"],
        "args": ["--http-port", "9000"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": value}],
        "envFrom": list(names),
        "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
        "ports": [{"name": "more", "containerPort": 9000}],
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "livenessProbe": {"httpGet": {"path": "/live", "port": 9000}},
        "securityContext": {"runAsUser": 1000},
        **fields,
    }


POD = {
    "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "d"}}],
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "a"}],
    "affinity": {"nodeAffinity": {}},
    "serviceAccountName": "runner",
    "terminationGracePeriodSeconds": 30,
    "imagePullSecrets": [{"name": "pull"}],
}
LABELS = {"labels": {"a": "b"}, "annotations": {"c": "d"}}
FULL = graph(
    component(
        "Frontend", "frontend", container(), {**POD, "initContainers": [container(name="i")]}
    ),
    component("decode", "decode", container(), POD, minAvailable=1, multinode={"nodeCount": 2}),
    env=[{"name": "C", "value": "1"}],
    restart={"id": "1", "strategy": {"order": ["decode"]}},
    topologyConstraint={"packDomain": "rack"},
)
FULL["spec"]["components"][0]["podTemplate"]["metadata"] = LABELS
FULL_SERVICES = {
    **graph(),
    "spec": {
        "envs": [{"name": "C", "value": "1"}],
        "services": {
            "Decode": {
                "componentType": "worker",
                "subComponentType": "decode",
                **LABELS,
                "resources": {"limits": {"gpu": 1, "custom": {"a/b": 1}, "cpu": 1}},
                "envs": [{"name": "A", "value": "1"}],
                "envFromSecret": "token",
                "volumeMounts": [
                    {"name": "v", "mountPoint": "/v"},
                    {"name": "w", "mountPoint": "/w", "useAsCompilationCache": True},
                ],
                "sharedMemory": {"size": "8Gi"},
                "scalingAdapter": {"enabled": True},
                "extraPodMetadata": LABELS,
                "extraPodSpec": {**POD, "mainContainer": container()},
                "livenessProbe": {"httpGet": {"path": "/live", "port": 1}},
            }
        },
    },
}


def with_junk(value: Any, junk: Any) -> Iterator[Any]:
    """Yield copies of a value in which one part each is replaced."""
    yield junk
    if not isinstance(value, dict | list):
        return
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        for other in with_junk(part, junk):
            changed = value.copy()
            changed[key] = other
            yield changed


@pytest.mark.parametrize("item", [FULL, FULL_SERVICES], ids=["v1beta1", "v1alpha1"])
@pytest.mark.parametrize("junk", [None, 5, "x", [], {}, [5], ["x"], {"a": 5}, [{}]], ids=repr)
def test_values_of_any_type_at_any_place_are_told_or_taken(item: dict[str, Any], junk: Any) -> None:
    refused = 0
    for spec in with_junk(item["spec"], junk):
        if not isinstance(spec, dict):
            continue  # the API server's schema refuses it
        result = make({**item, "spec": spec}, LEADER_WORKER)
        refused += result.status.state == "failed"
        assert list(references(result.check)) is not None
    assert refused


def test_fields_without_effect_are_said_and_valid() -> None:
    result = make(graph(component("decode", "decode", modelRef={"name": "m"})))
    condition = {row.type: row for row in result.status.conditions}["SpecValid"]
    assert (condition.status, condition.reason) == ("True", "NoEffect")
    assert condition.message.startswith("spec.components[0].modelRef: no effect:")


def test_annotations_without_effect_are_said() -> None:
    item = graph(component("Frontend", "frontend"))
    item["metadata"]["annotations"] = {
        "nvidia.com/deployment-rolling-update-max-surge": "lots",
        "nvidia.com/dynamo-gang": "maybe",
    }
    condition = {row.type: row for row in make(item).status.conditions}["SpecValid"]
    assert (condition.status, condition.reason) == ("True", "NoEffect")
    assert condition.message == (
        "metadata.annotations[nvidia.com/deployment-rolling-update-max-surge]: no effect: 'lots' "
        "is no number and no share such as 25%, the default; metadata.annotations[nvidia.com/"
        "dynamo-gang]: no effect: 'maybe' is neither true nor false"
    )
