"""Graphs of v1alpha1: what their services become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo.operations.operator.manifests import read_manifests
from dynamo.operations.operator.rules import check_graph

EXAMPLES = Path(__file__).parents[2] / "data" / "kubernetes"
FULL_SERVICE: dict[str, Any] = {
    "envs": [{"name": "A", "value": "1"}],
    "services": {
        "Decode": {
            "componentType": "worker",
            "subComponentType": "decode",
            "replicas": 3,
            "envs": [{"name": "B", "value": "2"}],
            "envFromSecret": "token",
            "resources": {
                "limits": {"gpu": "2", "memory": "8Gi", "custom": {"rdma/ib": "1"}},
                "requests": {"cpu": "4"},
            },
            "livenessProbe": {"httpGet": {"path": "/live", "port": 9090}},
            "volumeMounts": [
                {"name": "weights", "mountPoint": "/models"},
                {"name": "kernels", "useAsCompilationCache": True},
            ],
            "annotations": {"a": "1"},
            "extraPodMetadata": {"labels": {"team": "x"}},
            "extraPodSpec": {
                "nodeSelector": {"gpu": "h100"},
                "mainContainer": {"image": "worker:1", "args": ["--model", "m"]},
            },
            "sharedMemory": {"size": "16Gi"},
            "scalingAdapter": {"enabled": True},
        }
    },
}


def test_services_become_components() -> None:
    check = check_graph(FULL_SERVICE)
    assert not check.problems
    assert check.spec is not None
    (component,) = check.spec.components
    assert (component.type, component.replicas) == ("decode", 3)
    assert component.shared_memory_size == "16Gi"
    assert component.scaling_adapter is not None
    assert component.compilation_cache is not None
    assert component.compilation_cache.pvc_name == "kernels"
    assert check.spec.env == [{"name": "A", "value": "1"}]
    template = component.pod_template
    assert template["metadata"] == {"annotations": {"a": "1"}, "labels": {"team": "x"}}
    assert template["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert template["spec"]["volumes"] == [
        {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}
    ]
    assert template["spec"]["containers"] == [
        {
            "name": "main",
            "image": "worker:1",
            "args": ["--model", "m"],
            "env": [{"name": "B", "value": "2"}],
            "envFrom": [{"secretRef": {"name": "token"}}],
            "resources": {
                "limits": {"nvidia.com/gpu": "2", "memory": "8Gi", "rdma/ib": "1"},
                "requests": {"cpu": "4"},
            },
            "livenessProbe": {"httpGet": {"path": "/live", "port": 9090}},
            "volumeMounts": [{"name": "weights", "mountPath": "/models"}],
        }
    ]


def test_the_planner_of_an_old_manifest_is_started_by_its_new_name() -> None:
    path = EXAMPLES / "v1alpha1_vllm_disagg_planner.yaml"
    (graph,) = read_manifests(path.read_text(), path.name)
    spec = check_graph(graph["spec"]).spec
    assert spec is not None
    (planner,) = (part for part in spec.components if part.type == "planner")
    (main,) = planner.pod_template["spec"]["containers"]
    assert main["command"] == ["python3", "-m", "dynamo.planner"]
