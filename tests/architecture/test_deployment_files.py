"""The files of `deploy/` fit the compose schema and name settings, ports and metrics that exist."""

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
SCRAPED = {"job", "instance", "le", "role", "process", "deployment"}
"""Labels of buckets, and those that Prometheus adds: its own and those of /metrics/targets."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    with (DEPLOY / "docker-compose.yml").open() as file:
        return dict(yaml.safe_load(file))


def expressions() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by metric name. Another test compares the page with the code."""
    by_name: dict[str, tuple[str, set[str]]] = {}
    for row in ROW.finditer((ROOT / "docs" / "reference" / "metrics.md").read_text()):
        labels = set(row["labels"].replace(",", " ").split())
        ends = ("_bucket", "_sum", "_count") if row["kind"] == "histogram" else ("",)
        kind = "gauge" if row["kind"] == "gauge" else "counter"
        by_name |= {row["name"] + end: (kind, labels) for end in ends}
    return by_name


def test_the_compose_file_fits_the_compose_schema() -> None:
    words = ("--builtin-schema", "vendor.compose-spec", str(DEPLOY / "docker-compose.yml"))
    command = [str(Path(sys.executable).with_name("check-jsonschema")), *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_services_have_profiles_and_bind_to_loopback(compose: dict[str, Any]) -> None:
    services = compose["services"]
    infra = {name for name, service in services.items() if "infra" in service["profiles"]}
    assert infra == {"etcd", "nats"}
    assert all("stack" in service["profiles"] for service in services.values())
    assert "COMPOSE_PROFILES=stack" in (DEPLOY / ".env").read_text().splitlines()
    for name, service in services.items():
        assert all(wanted in services for wanted in service.get("depends_on", ())), name
        for port in service.get("ports", ()):
            assert port.startswith("${BIND:-127.0.0.1}:"), name


def test_containers_name_settings_graphs_and_files_that_exist(compose: dict[str, Any]) -> None:
    names = {environment_name(key) for key in setting_specs_by_key()}
    names |= {"DYNAMO_ETCD_ENDPOINTS", "DYNAMO_NATS_URL", "DYNAMO_LOG", "HF_TOKEN"}
    parts = [part for name, part in compose["services"].items() if name.startswith("dynamo-")]
    assert len(parts) == 4
    for part in parts:
        assert set(part["environment"]) <= names
        assert "healthcheck" in part
        (graph,) = (word for word in part["command"] if SERVES.fullmatch(word))
        module, _, service = graph.partition(":")
        file = ROOT / "examples/llm" / f"{module.replace('.', '/')}.py"
        assert re.search(rf"\b{service}\b", file.read_text())
        assert "/config/distributed.yaml" in part["command"]
    assert (ROOT / "configs" / "distributed.yaml").exists()


def test_prometheus_asks_every_frontend_for_the_ports(compose: dict[str, Any]) -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    services = compose["services"]
    urls = {config["url"] for job in jobs for config in job.get("http_sd_configs", ())}
    frontends = [name for name in services if name.startswith("dynamo-frontend")]
    assert urls == {f"http://{name}:8000/metrics/targets" for name in frontends}
    for name in frontends:
        assert any(port.endswith(":8000") for port in services[name]["ports"])
    for name, service in services.items():
        if name.startswith("dynamo-"):
            assert service["environment"]["DYNAMO_RUNTIME__STATUS_HOST"] == "0.0.0.0"
    static = [config for job in jobs for config in job.get("static_configs", ())]
    assert {host for config in static for host in config["targets"]} == {"etcd:2379"}


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
    uids = {datasource["uid"] for datasource in source["datasources"]}
    panels = json.loads(BOARD.read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} <= uids
