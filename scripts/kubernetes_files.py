"""The files in deploy/ that are written from the kinds of Kubernetes and the operator's rights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.manifests import read_manifests, write_manifests

ROOT = Path(__file__).parents[1]
OPERATOR = "deploy/kubernetes/operator.yaml"
CHART = "deploy/helm/dynamo/files"


def kubernetes_files(origin: str) -> Mapping[str, str]:
    """Return the text of every file by path: the kinds, and the rules of the operator's
    ClusterRole for its chart. `origin` says how they
    are written."""
    files = {
        f"{folder}/{kind['metadata']['name']}.yaml": f"# {origin}.\n{write_manifests([kind])}"
        for kind in custom_resources()
        for folder in ("deploy/kubernetes/crds", f"{CHART}/crds")
    }
    objects = read_manifests((ROOT / OPERATOR).read_text(encoding="utf-8"), OPERATOR)
    (role,) = (item for item in objects if item["kind"] == "ClusterRole")
    rules = write_manifests([role["rules"]])
    return files | {f"{CHART}/rules.yaml": f"# {origin}, of {OPERATOR}.\n{rules}"}
