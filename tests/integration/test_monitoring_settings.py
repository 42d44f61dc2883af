"""The section `monitoring`: an installed Prometheus, and custom metrics."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.conftest import until
from tests.faults.cluster import Cluster
from tests.integration.test_grafana_panels import ask, fetch
from tests.support.servers import free_port

from dynamo.cli.entry import main
from dynamo.operations.alerts.rules import RULES

pytestmark = pytest.mark.timeout(180)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not on the path"
)
SETTING = "DYNAMO_MONITORING__PROMETHEUS__"
API_KEY = "a-key"
CUSTOM = [
    {"name": "request_latency_p99", "type": "histogram", "buckets": [0.1, 0.33, 60]},
    {"name": "cache_hit_ratio", "type": "gauge"},
    {"name": "gpu_utilization", "type": "gauge"},
    {"name": "first_texts", "source": "time_to_first_token", "buckets": [0.7]},
]
PROCESSES = {"supervisor", "frontend", "observer", "prometheus", "worker-1", "worker-2"}


def read(port: int, path: str) -> Any:
    """Return what a Prometheus answers; None while it is away."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]
    except OSError:
        return None


def healthy(port: int) -> set[str]:
    """Return the processes that a Prometheus has scraped."""
    answer = read(port, "targets") or {"activeTargets": []}
    targets = answer["activeTargets"]
    return {each["labels"]["process"] for each in targets if each["health"] == "up"}


def child_pid(cluster: Cluster) -> int:
    """Return the process of Prometheus itself, 0 while there is none."""
    for process in cluster.processes("prometheus"):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else 0
    return 0


@pytest.fixture
def port() -> int:
    return free_port()


def with_prometheus(model: Path, folder: Path, port: int) -> Cluster:
    environ = {
        f"{SETTING}ENABLED": "true",
        f"{SETTING}PORT": str(port),
        f"{SETTING}SCRAPE_INTERVAL": "1",
        "DYNAMO_SERVER__API_KEYS": API_KEY,
        "DYNAMO_MONITORING__CUSTOM_METRICS": json.dumps(CUSTOM),
        "DYNAMO_SECURITY__SECRET": "s" * 40,
    }
    return Cluster(model, folder, workers=2, flags=("--observer",), environ=environ)


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path, port: int) -> Iterator[Cluster]:
    with with_prometheus(tiny_model, tmp_path, port) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scraped(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, int]]:
    """Return a deployment whose processes have been scraped, and the port of its Prometheus."""
    port = free_port()
    with with_prometheus(tiny_model, tmp_path_factory.mktemp("scraped"), port) as cluster:
        until(lambda: healthy(port) == PROCESSES, timeout_s=30)
        yield cluster, port


@needs_prometheus
def test_every_process_is_scraped_with_keys_and_a_secret(scraped: tuple[Cluster, int]) -> None:
    _, port = scraped
    (group,) = read(port, "rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule.name for rule in RULES]
    assert read(port, "status/flags")["web.listen-address"] == f"127.0.0.1:{port}"


@needs_prometheus
def test_a_killed_prometheus_is_started_again_with_its_data(scraped: tuple[Cluster, int]) -> None:
    cluster, port = scraped
    os.kill(child_pid(cluster), signal.SIGKILL)
    until(lambda: 'error="Prometheus: it ended: SIGKILL"' in cluster.log, timeout_s=20)
    until(lambda: healthy(port) == PROCESSES, timeout_s=30)
    deaths = read(port, "query?query=count_over_time(up{process='worker-1'}[5m])")
    assert int(deaths["result"][0]["value"][1]) > 1, "samples of before its death"


@needs_prometheus
def test_a_replaced_prometheus_leaves_port_and_data_to_the_next(
    scraped: tuple[Cluster, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, port = scraped
    before, length = child_pid(cluster), len(cluster.log)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(cluster.folder))
    assert main(["restart", "prometheus"]) == 0
    until(lambda: child_pid(cluster) not in {0, before}, timeout_s=20)
    until(lambda: healthy(port) == PROCESSES, timeout_s=30)
    assert "Prometheus: it ended" not in cluster.log[length:]
    assert "waits until its port is free" not in cluster.log[length:]


@needs_prometheus
def test_it_waits_for_a_port_that_is_in_use(
    tiny_model: Path, tmp_path: Path, port: int, request: pytest.FixtureRequest
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        cluster = request.getfixturevalue("cluster")
        until(lambda: f"port {port} on 127.0.0.1 is in use" in cluster.log, timeout_s=20)
        assert "set monitoring.prometheus.port" in cluster.log
        until(lambda: len(cluster.ready("supervisor")) == 1, timeout_s=20)
    until(lambda: healthy(port) == PROCESSES, timeout_s=30)


@needs_prometheus
def test_it_ends_with_a_killed_supervisor(cluster: Cluster, port: int) -> None:
    until(lambda: healthy(port), timeout_s=30)
    (supervisor,) = cluster.processes("supervisor")
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: read(port, "targets") is None, timeout_s=20)


@needs_prometheus
def test_custom_metrics_answer_their_queries(scraped: tuple[Cluster, int]) -> None:
    cluster, port = scraped

    def value(query: str) -> float:
        result = (read(port, f"query?{urlencode({'query': query})}") or {"result": ()})["result"]
        return float(result[0]["value"][1]) if result else float("nan")

    def ask_and_query() -> bool:
        ask(cluster.port, API_KEY)
        p99 = value("histogram_quantile(0.99, sum by (le) (rate(request_latency_p99_bucket[1m])))")
        return 0 < p99 <= 60 and 0 < value("cache_hit_ratio") < 1

    until(ask_and_query, timeout_s=40)
    assert value("count(count by (le) (request_latency_p99_bucket))") == 4
    assert value("count(count by (le) (first_texts_bucket))") == 2


def test_custom_metrics_are_those_of_all_frontends(tiny_model: Path, tmp_path: Path) -> None:
    environ = {"DYNAMO_MONITORING__CUSTOM_METRICS": json.dumps(CUSTOM)}
    with Cluster(tiny_model, tmp_path, workers=1, frontends=2, environ=environ) as cluster:
        for _ in range(8):
            ask(cluster.port)

        def lines() -> list[str]:
            return fetch(f"http://127.0.0.1:{cluster.port}/metrics")[1].splitlines()

        # An answer is counted after its client has read it.
        until(lambda: 'request_latency_p99_count{model="tiny"} 8' in lines(), timeout_s=20)
        assert 'request_latency_p99_bucket{model="tiny",le="60.0"} 8' in lines()
        assert 'first_texts_bucket{model="tiny",le="+Inf"} 8' in lines()
        assert [line for line in lines() if line.startswith('cache_hit_ratio{model="tiny"} 0.')]
        (supervisor,) = cluster.processes("supervisor")
        text = fetch(f"{supervisor.status_url}/metrics")[1]
        assert "# TYPE gpu_utilization gauge" in text


def test_a_deployment_serves_without_an_installed_prometheus(
    tiny_model: Path, tmp_path: Path
) -> None:
    environ = {f"{SETTING}ENABLED": "true", "PATH": str(tmp_path)}
    with Cluster(tiny_model, tmp_path, workers=1, environ=environ) as cluster:
        until(lambda: len(cluster.ready("supervisor")) == 1, timeout_s=20)
        assert not cluster.processes("prometheus")
        assert (
            "PATH has no program `prometheus`; install it, or turn the setting off" in cluster.log
        )
