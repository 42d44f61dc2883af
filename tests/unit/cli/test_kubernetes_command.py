"""`dynamo kubernetes`: what needs no cluster, and wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.cli import main
from dynamo.operations.operator.manifests import read_manifests

EXAMPLES = Path(__file__).parents[2] / "data" / "kubernetes"
AGGREGATED = str(EXAMPLES / "v1beta1_vllm_agg_router.yaml")
OLD = str(EXAMPLES / "v1alpha1_vllm_disagg_router.yaml")
NODES = """
kind: List
apiVersion: v1
items:
- apiVersion: v1
  kind: Node
  metadata: {name: a, labels: {topology.kubernetes.io/rack: r1}}
  status: {allocatable: {nvidia.com/gpu: "1", ephemeral-storage: 100Gi}}
- apiVersion: v1
  kind: Node
  metadata: {name: b, labels: {topology.kubernetes.io/rack: r2}}
  status: {allocatable: {nvidia.com/gpu: "2", ephemeral-storage: 100Gi}}
"""


def test_crds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "crds"]) == 0
    kinds = [item["kind"] for item in read_manifests(capsys.readouterr().out, "out")]
    assert kinds == ["CustomResourceDefinition"] * 3


def test_an_old_graph_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "convert", "-f", OLD]) == 0
    (graph,) = read_manifests(capsys.readouterr().out, "out")
    assert graph["apiVersion"] == "nvidia.com/v1beta1"
    assert [part["name"] for part in graph["spec"]["components"]] == [
        "Frontend",
        "VllmDecodeWorker",
        "VllmPrefillWorker",
    ]


def test_what_is_wrong_in_a_graph_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(Path(OLD).read_text().replace("componentType", "componentTyp"))
    assert main(["kubernetes", "convert", "-f", str(path)]) == 1
    assert (
        "error: vllm-v1-disagg-router: spec.services.Frontend.componentTyp: unknown field; "
        "did you mean 'componentType'?"
    ) in capsys.readouterr().err


def test_graphs_are_placed_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(NODES)
    assert main(["kubernetes", "place", "-f", AGGREGATED, "--nodes", str(nodes)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "vllm-agg-router: 2 pods in host a",
        "  a: 1 VllmDecodeWorker, 1 Frontend",
        "vllm-agg-router-VllmDecodeWorker-1: 1 pods in host b",
        "  b: 1 VllmDecodeWorker",
    ]
    assert main(["kubernetes", "place", "-f", OLD, "--nodes", str(nodes)]) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "vllm-v1-disagg-router-VllmPrefillWorker-1: waits, no domain takes all of its pods",
        "  rack r1 lacks 1 nvidia.com/gpu",
        "  rack r2 lacks 1 nvidia.com/gpu",
        "  cluster lacks 1 nvidia.com/gpu",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: ACTION"),
        (["crd"], "invalid choice: 'crd'"),
        (["convert"], "-f is missing"),
        (["operator", "-f", AGGREGATED], "hint: it is one of convert, manifests, place"),
        (["manifests", "-f", AGGREGATED, "--namespace", "x"], "manifests has no flag --namespace"),
        (["status", "--image", "dynamo:latest-vllm"], "status has no flag --image"),
        (["manifests", "-f", AGGREGATED, "--groups", "grov.io"], "did you mean 'grove.io'?"),
        (["convert", "-f", "missing.yaml"], "cannot read missing.yaml: No such file"),
        (["place", "-f", AGGREGATED], "--nodes is missing"),
        (["place", "-f", AGGREGATED, "--nodes", AGGREGATED], "no node in"),
    ],
)
def test_wrong_words_exit_with_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kubernetes", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: 1", "a document is no object of Kubernetes"),
        ("a: [", "not valid YAML"),
        ("", "but nothing"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {}", "no DynamoGraphDeployment in"),
        ("apiVersion: v1\nkind: Pod", "Pod has no metadata"),
    ],
)
def test_files_without_a_graph_exit_with_2(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(content)
    assert main(["kubernetes", "convert", "-f", str(path)]) == 2
    assert text in capsys.readouterr().err
