"""The files in deploy/ that are written from the kinds of Kubernetes and the operator's rights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.manifests import read_manifests, write_manifests

ROOT = Path(__file__).parents[1]
OPERATOR = "deploy/kubernetes/operator.yaml"
CHART = "deploy/helm/dynamo/files"

CLUSTER_KINDS = {"nodes", "customresourcedefinitions", "priorityclasses"}
"""Resources that are in no namespace."""
READ_EVERYWHERE = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},  # free resources of nodes
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["dynamo-operator"],
        "verbs": ["get"],
    },
)
"""Rights of an operator of one namespace outside of it."""


def kubernetes_files(origin: str) -> Mapping[str, str]:
    """Return the text of every file by path: the kinds, and the rules of the operator for its
    chart. Limited to a namespace, it needs `namespace-rules` there and `cluster-rules` everywhere.
    `origin` says how they are written."""
    files = {
        f"{folder}/{kind['metadata']['name']}.yaml": f"# {origin}.\n{write_manifests([kind])}"
        for kind in custom_resources()
        for folder in ("deploy/kubernetes/crds", f"{CHART}/crds")
    }
    objects = read_manifests((ROOT / OPERATOR).read_text(encoding="utf-8"), OPERATOR)
    (role,) = (item for item in objects if item["kind"] == "ClusterRole")
    everywhere = [rule for rule in role["rules"] if CLUSTER_KINDS & set(rule["resources"])]
    rules = {
        "rules": role["rules"],
        "namespace-rules": [rule for rule in role["rules"] if rule not in everywhere],
        "cluster-rules": [*everywhere, *READ_EVERYWHERE],
    }
    return files | {
        f"{CHART}/{name}.yaml": f"# {origin}, of {OPERATOR}.\n{write_manifests([rows])}"
        for name, rows in rules.items()
    }
