"""A real Prometheus finds all processes, evaluates the rules, and has data for every panel."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.conftest import until
from tests.faults.cluster import Cluster
from tests.integration.test_grafana_panels import FOLDER, ask, fetch
from tests.support.servers import free_port

from dynamo.operations.alerts.rules import RULES

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the path"),
    pytest.mark.timeout(180),
]
RULES_FILE = FOLDER.parents[1] / "prometheus-rules.yml"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: dynamo
    http_sd_configs:
      - {{url: "http://127.0.0.1:{port}/metrics/targets", refresh_interval: 1s}}
"""


class Prometheus:
    """A Prometheus that scrapes a deployment each second."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.port = free_port()
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(rules=RULES_FILE, port=cluster.port))
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("prometheus", f"--config.file={config}", "--log.level=warn"),
                    *(f"--storage.tsdb.path={folder / 'tsdb'}", "--web.enable-lifecycle"),
                    *(f"--web.listen-address=127.0.0.1:{self.port}",),
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def is_up(self) -> bool:
        try:
            return bool(self.get("targets"))
        except OSError:
            return False

    def scrapes(self) -> dict[str, str]:
        """Return the last scrape error of each process that answers or not, "" for none."""
        return {
            target["labels"]["process"]: target["lastError"]
            for target in self.get("targets")["activeTargets"]
            if target["health"] != "unknown"
        }

    def values(self, query: str) -> list[str]:
        """Return the values of a query that are numbers."""
        values = [series["value"][1] for series in self.get("query", query=query)["result"]]
        return [value for value in values if value != "NaN"]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = (
        *("--router-mode", "kv", "--router-replicas", "1", "--disagg", "always", "--observer"),
        *("--kv-host-size", "1GB"),
    )
    folder = tmp_path_factory.mktemp("prometheus")
    with Cluster(tiny_model, folder, workers=0, prefill=1, decode=2, flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(cluster, tmp_path_factory.mktemp("tsdb"))
    try:
        until(prometheus.is_up, timeout_s=30)
        until(lambda: len(prometheus.scrapes()) == 7, timeout_s=30)
        yield prometheus
    finally:
        prometheus.process.send_signal(signal.SIGTERM)
        prometheus.process.wait(30)


def test_every_process_is_scraped(prometheus: Prometheus) -> None:
    assert prometheus.scrapes() == dict.fromkeys(
        [
            *("supervisor", "frontend", "router", "observer"),
            *("prefill-worker", "decode-worker-1", "decode-worker-2"),
        ],
        "",
    )


def test_every_query_of_the_dashboards_returns_data(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    """Counters of what did not happen return 0."""
    queries = {
        target["expr"]
        .replace("$__rate_interval", "1m")
        .replace("$model", ".*")
        .replace("$worker", ".*"): panel["title"]
        for path in FOLDER.glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }
    assert len(queries) > 60

    def missing() -> set[str]:
        ask(cluster.port)
        return {
            f"{title}: {query}" for query, title in queries.items() if not prometheus.values(query)
        }

    until(lambda: not missing(), timeout_s=60)


def test_the_rules_are_evaluated_without_errors(prometheus: Prometheus) -> None:
    def states() -> set[str]:
        (group,) = prometheus.get("rules")["groups"]
        assert len(group["rules"]) == len(RULES)
        return {f"{rule['health']} {rule.get('lastError', '')}".strip() for rule in group["rules"]}

    until(lambda: states() == {"ok"}, timeout_s=20)


def test_exemplars_name_requests(cluster: Cluster, prometheus: Prometheus) -> None:
    metric = "dynamo_frontend_time_to_first_token_seconds_bucket"

    def exemplars() -> list[Any]:
        ask(cluster.port)
        series: list[Any] = prometheus.get(
            "query_exemplars", query=metric, start="0", end="9999999999"
        )
        return series

    series = until(exemplars, timeout_s=20)
    (exemplar, *_) = series[0]["exemplars"]
    stories = fetch(_observer_url(cluster) + "/requests")[1]
    assert exemplar["labels"]["request_id"] in stories


def _observer_url(cluster: Cluster) -> str:
    (observer,) = cluster.processes("observer")
    return observer.address
