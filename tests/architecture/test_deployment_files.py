"""The files of `deploy/` fit the compose schema and name settings, ports and metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from dynamo.core.settings.keys import environment_name, setting_specs_by_key
from dynamo.inference.engines.packages import ENGINE_PACKAGES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[^|]*)\|", re.MULTILINE)
NAME = re.compile(r"\b(?:dynamo|process)_\w+")
COUNTED = re.compile(r"\b(?:rate|increase)\((\w+)")
GROUPED = re.compile(r"by \(([^)]*)\)")
SERVES = re.compile(r"graphs\.\w+:\w+")
COPIED = re.compile(r"^COPY (\S+)", re.MULTILINE)
SCRAPED = {"job", "instance", "le", "role", "process", "deployment"}
"""Labels of buckets, and those that Prometheus adds: its own and those of /metrics/targets."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    with (DEPLOY / "docker-compose.yml").open() as file:
        return dict(yaml.safe_load(file))


def panels() -> list[dict[str, Any]]:
    """The panels of all dashboards."""
    return [panel for board in BOARDS for panel in json.loads(board.read_text())["panels"]]


def expressions() -> list[str]:
    """The queries of all dashboards and alerts."""
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*queries, *(rule["expr"] for rule in rules)]


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by metric name. Another test compares the page with the code."""
    by_name: dict[str, tuple[str, set[str]]] = {}
    for row in ROW.finditer((ROOT / "docs" / "reference" / "metrics.md").read_text()):
        labels = set(row["labels"].replace(",", " ").split())
        ends = ("_bucket", "_sum", "_count") if row["kind"] == "histogram" else ("",)
        kind = "gauge" if row["kind"] == "gauge" else "counter"
        by_name |= {row["name"] + end: (kind, labels) for end in ends}
    return by_name


def test_the_compose_files_fit_the_compose_schema() -> None:
    files = map(str, sorted(DEPLOY.glob("docker-compose*.yml")))
    words = ("--builtin-schema", "vendor.compose-spec", *files)
    command = [str(Path(sys.executable).with_name("check-jsonschema")), *words]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_services_have_profiles_and_bind_to_loopback(compose: dict[str, Any]) -> None:
    services = compose["services"]
    infra = {name for name, service in services.items() if "infra" in service["profiles"]}
    assert infra == {"etcd", "nats"}
    for profile, workers in {
        "stack": {"dynamo-worker"},
        "disagg": {"dynamo-prefill-worker", "dynamo-decode-worker"},
    }.items():
        parts = {name for name, service in services.items() if profile in service["profiles"]}
        assert {name for name in parts if name.endswith("-worker")} == workers
        assert parts >= {"etcd", "nats", "dynamo-router", "dynamo-frontend", "prometheus"}
    assert "COMPOSE_PROFILES=stack" in (DEPLOY / ".env").read_text().splitlines()
    for name, service in services.items():
        assert all(wanted in services for wanted in service.get("depends_on", ())), name
        for port in service.get("ports", ()):
            assert port.startswith("${BIND:-127.0.0.1}:"), name


def test_containers_name_settings_graphs_and_files_that_exist(compose: dict[str, Any]) -> None:
    names = {environment_name(key) for key in setting_specs_by_key()}
    names |= {"DYNAMO_ETCD_ENDPOINTS", "DYNAMO_NATS_URL", "DYNAMO_LOG", "HF_TOKEN"}
    parts = [part for name, part in compose["services"].items() if name.startswith("dynamo-")]
    assert len(parts) == 6
    defaults = dict(
        line.split("=") for line in (DEPLOY / ".env").read_text().splitlines()[1:] if line[0] != "#"
    )
    for part in parts:
        assert set(part["environment"]) <= names
        assert "healthcheck" in part
        disagg = {"DEPLOY_GRAPH": "disagg_router", "DEPLOY_CONFIG": "disagg.yaml"}
        names_by_profile = {"stack": defaults, "disagg": defaults | disagg}
        for profile in part["profiles"]:
            check_command(part["command"], names_by_profile[profile])


def check_command(command: list[str], environ: dict[str, str]) -> None:
    """Check that the graph, its service and the file of a container's command exist."""
    words = [Template(word).substitute(environ) for word in command]
    (graph,) = (word for word in words if SERVES.fullmatch(word))
    module, _, service = graph.partition(":")
    file = ROOT / "examples/llm" / f"{module.replace('.', '/')}.py"
    assert re.search(rf"\b{service}\b", file.read_text())
    (config,) = (word for word in words if word.startswith("/config/"))
    assert (ROOT / config.replace("/config/", "configs/")).exists()


FRAMEWORKS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "native": ""}
"""The frameworks of container/build.sh -> the engine's package."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_has_an_image(framework: str) -> None:
    build = ROOT / "container" / "build.sh"
    words = [str(build), "--dry-run", "--framework", framework]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    match = re.search(r"--file (\S+) --tag (\S+)", printed)
    assert match is not None
    assert match[2] == f"dynamo:latest-{framework}"
    recipe = Path(match[1]).read_text()
    for source in COPIED.findall(recipe):
        assert (ROOT / source).exists(), source
    if kind := FRAMEWORKS[framework]:
        assert f"ENV DYNAMO_ENGINE__KIND={kind}\n" in recipe
        assert f"check_engine_package('{kind}')" in recipe
        version = re.search(r"^ARG BASE=\S+:v?([\d.]+)$", recipe, re.MULTILINE)
        assert version is not None
        assert ENGINE_PACKAGES[kind].supports(version[1])


def test_gpus_are_for_all_workers(compose: dict[str, Any]) -> None:
    with (DEPLOY / "docker-compose.gpu.yml").open() as file:
        services = yaml.safe_load(file)["services"]
    assert set(services) == {name for name in compose["services"] if name.endswith("-worker")}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--framework", "cuda"), 2, "unknown framework cuda"),
        (("--framework",), 2, "--framework has no value"),
        (("--engine", "vllm"), 2, "unknown option --engine"),
    ],
)
def test_wrong_words_of_the_build_are_refused(words: Sequence[str], code: int, text: str) -> None:
    ended = subprocess.run(
        [str(ROOT / "container" / "build.sh"), *words], capture_output=True, text=True
    )
    assert (ended.returncode, text in ended.stderr) == (code, True), ended.stderr


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


def test_dashboards_are_decoded_by_grafana_and_link_to_the_guide() -> None:
    for board in BOARDS:
        content = json.loads(board.read_text())
        decoded = Dashboard.from_json(content)
        assert len(decoded.panels or ()) == len(content["panels"])
        names = [each.name for each in decoded.templating.list_val or ()]
        assert names == ["model", "worker", "guide"]
        for panel in content["panels"]:
            assert panel["links"], panel["title"]
            for link in panel["links"]:
                page = link["url"].removeprefix("${guide}/")
                assert (DEPLOY.parent / "docs" / page).is_file(), link


def test_dashboards_and_alerts_read_metrics_that_exist() -> None:
    known = metrics()
    used = {name for text in expressions() for name in NAME.findall(text)}
    assert len(used) > 25
    assert used <= set(known)


def test_dashboards_and_alerts_count_what_grows_and_groups_by_labels_that_exist() -> None:
    known = metrics()
    for text in expressions():
        labels = set().union(*(known[name][1] for name in NAME.findall(text)))
        for name in COUNTED.findall(text):
            assert known[name][0] == "counter", text
        for group in GROUPED.findall(text):
            assert set(group.replace(",", " ").split()) <= labels | SCRAPED, text
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)


def test_pages_that_panels_name_exist() -> None:
    names = {
        name for panel in panels() for name in re.findall(r"docs/\S+\.md", panel["description"])
    }
    assert len(names) > 5
    assert all((ROOT / name).is_file() for name in names)


def test_prometheus_has_the_rules_of_alerts(compose: dict[str, Any]) -> None:
    files = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"]
    volumes = compose["services"]["prometheus"]["volumes"]
    assert all(f"./{name}:/etc/prometheus/{name}:ro" in volumes for name in files)
    assert all((DEPLOY / name).is_file() for name in files)


def test_grafana_finds_its_source() -> None:
    source = yaml.safe_load((DEPLOY / "grafana/datasources/prometheus.yml").read_text())
    uids = {datasource["uid"] for datasource in source["datasources"]}
    assert {panel["datasource"]["uid"] for panel in panels()} <= uids
