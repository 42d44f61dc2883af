"""What `deploy/` says exists: compose's schema, our settings, ports and metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.core.settings.keys import environment_name, setting_specs_by_key

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "dynamo.json"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[^|]*)\|", re.MULTILINE)
NAME = re.compile(r"\b(?:dynamo|process)_\w+")
COUNTED = re.compile(r"\b(?:rate|increase)\((\w+)")
GROUPED = re.compile(r"by \(([^)]*)\)")
SERVES = re.compile(r"graphs\.\w+:\w+")
SCRAPED = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    with (DEPLOY / "docker-compose.yml").open() as file:
        return dict(yaml.safe_load(file))


def expressions() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by name, as rendered; the page is held true to the code by its own test."""
    found = {}
    for row in ROW.finditer((ROOT / "docs" / "reference" / "metrics.md").read_text()):
        labels = set(row["labels"].replace(",", " ").split())
        ends = ("_bucket", "_sum", "_count") if row["kind"] == "histogram" else ("",)
        kind = "gauge" if row["kind"] == "gauge" else "counter"
        found |= {row["name"] + end: (kind, labels) for end in ends}
    return found


def test_compose_takes_the_file() -> None:
    """By the compose specification's schema."""
    words = ("--builtin-schema", "vendor.compose-spec", str(DEPLOY / "docker-compose.yml"))
    command = [str(Path(sys.executable).with_name("check-jsonschema")), *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_the_parts_and_their_profiles(compose: dict[str, Any]) -> None:
    services = compose["services"]
    infra = {name for name, one in services.items() if "infra" in one["profiles"]}
    assert infra == {"etcd", "nats"}
    assert all("stack" in one["profiles"] for one in services.values())
    assert "COMPOSE_PROFILES=stack" in (DEPLOY / ".env").read_text().splitlines()
    for name, one in services.items():
        assert all(wanted in services for wanted in one.get("depends_on", ())), name
        for port in one.get("ports", ()):
            assert port.startswith("${BIND:-127.0.0.1}:"), name


def test_every_part_of_ours_is_ours(compose: dict[str, Any]) -> None:
    """Settings, graphs and files that containers name are there."""
    names = {environment_name(key) for key in setting_specs_by_key()}
    names |= {"DYNAMO_ETCD_ENDPOINTS", "DYNAMO_NATS_URL", "DYNAMO_LOG", "HF_TOKEN"}
    parts = {n: one for n, one in compose["services"].items() if n.startswith("dynamo-")}
    assert len(parts) == 4
    for one in parts.values():
        assert set(one["environment"]) <= names
        assert "healthcheck" in one
        (graph,) = (word for word in one["command"] if SERVES.fullmatch(word))
        module, _, service = graph.partition(":")
        file = ROOT / "examples/llm" / f"{module.replace('.', '/')}.py"
        assert re.search(rf"\b{service}\b", file.read_text())
        assert "/config/distributed.yaml" in one["command"]
    assert (ROOT / "configs" / "distributed.yaml").exists()


def test_prometheus_asks_who_is_there(compose: dict[str, Any]) -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    services = compose["services"]
    status = int(services["dynamo-worker"]["environment"]["DYNAMO_RUNTIME__STATUS_PORT"])
    serving = {"frontend": 8000, "router": 8001, "worker": status + 1, "supervisor": status}
    for job in jobs:
        for sought in job.get("dns_sd_configs", ()):
            assert set(sought["names"]) <= set(services)
            assert sought["port"] == serving[job["job_name"]]
    asked = {name for job in jobs for one in job.get("dns_sd_configs", ()) for name in one["names"]}
    assert asked == {name for name in services if name.startswith("dynamo-")}


def test_the_dashboard_shows_metrics_that_exist() -> None:
    known = metrics()
    used = {name for text in expressions() for name in NAME.findall(text)}
    assert len(used) > 25
    assert used <= set(known)


def test_the_dashboard_counts_what_grows_and_groups_by_labels_that_exist() -> None:
    known = metrics()
    for text in expressions():
        labels = set().union(*(known[name][1] for name in NAME.findall(text)))
        for name in COUNTED.findall(text):
            assert known[name][0] == "counter", text
        for group in GROUPED.findall(text):
            assert set(group.replace(",", " ").split()) <= labels | SCRAPED, text
    titles = [panel["title"] for panel in json.loads(BOARD.read_text())["panels"]]
    assert len(set(titles)) == len(titles)


def test_grafana_finds_its_source() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/datasources/prometheus.yml").read_text())
    uids = {one["uid"] for one in source["datasources"]}
    panels = json.loads(BOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} <= uids
