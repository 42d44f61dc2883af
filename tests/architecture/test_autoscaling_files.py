"""The files for Prometheus, HPAs and KEDA name ports, labels and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.kinds import ComponentSpec, GraphSpec
from dynamo.operations.operator.names import GraphKey
from dynamo.operations.operator.pods import PodMaker, PodOptions

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "kubernetes" / "autoscaling"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
NAME = re.compile(r"\bdynamo_(?:worker|frontend)_\w+")
META = "__meta_kubernetes_pod_label_"


def read(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text())


def test_the_pod_monitor_finds_pods_of_graphs() -> None:
    spec = read("podmonitor.yaml")["spec"]
    component = ComponentSpec(name="decode", type="decode")
    graph = GraphKey("default", "llm", "uid")
    maker = PodMaker(graph, GraphSpec(components=[component]), "12345678", PodOptions())
    pod = maker.template(component, maker.defaults(component))
    labels = pod["metadata"]["labels"]
    assert all(row["key"] in labels for row in spec["selector"]["matchExpressions"])
    (endpoint,) = spec["podMetricsEndpoints"]
    (main,) = pod["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in main["ports"]}
    known = {META + re.sub(r"\W", "_", name) for name in labels} | {
        "__meta_kubernetes_pod_name",
        "role",
    }
    assert {name for row in endpoint["relabelings"] for name in row["sourceLabels"]} <= known
    assert {row["targetLabel"] for row in endpoint["relabelings"]} >= {"deployment", "component"}


def test_queries_read_metrics_that_exist() -> None:
    for path in sorted(FILES.glob("*.yaml")):
        for name in set(NAME.findall(path.read_text())) - {"dynamo_worker_requests"}:
            assert f"| `{name.removesuffix('_bucket')}` |" in METRICS, (path.name, name)


def test_the_autoscaler_reads_a_metric_of_the_adapter() -> None:
    hpa = read("hpa.yaml")
    for version in ("1.30", "1.37"):
        kubernetes_validate.validate(hpa, version, strict=True)
    names = {rule["name"]["as"] for rule in read("prometheus-adapter.yaml")["rules"]["custom"]}
    assert {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]} <= names


def test_autoscalers_scale_a_kind_that_has_the_subresource() -> None:
    kinds = {
        (f"{item['spec']['group']}/{version['name']}", item["spec"]["names"]["kind"])
        for item in custom_resources()
        for version in item["spec"]["versions"]
        if "scale" in version.get("subresources", {})
    }
    for name in ("hpa.yaml", "keda.yaml"):
        target = read(name)["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) in kinds
