"""Every query of the Grafana dashboards has data after traffic, in the ports that Prometheus finds."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import pytest
from tests.conftest import until
from tests.faults.cluster import Cluster

from dynamo.application.frontend_metrics import KNOWN_STATUSES
from dynamo.inference.worker_metrics import FAILURES
from dynamo.operations.observer.stages import STAGES

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)\Z")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
TARGET_LABELS = {"role", "process", "deployment"}
TEXT = "the quick brown fox jumps over a lazy dog while workers serve tokens of many models " * 6


class Sample(NamedTuple):
    """A value that Prometheus would store."""

    name: str
    labels: Mapping[str, str]
    value: float


def fetch(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.headers["content-type"], response.read().decode()


def list_groups(port: int) -> list[dict[str, Any]]:
    content_type, body = fetch(f"http://127.0.0.1:{port}/metrics/targets")
    assert content_type == "application/json"
    groups: list[dict[str, Any]] = json.loads(body)
    return groups


def scrape(group: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a target group, with the labels that Prometheus adds."""
    for target in group["targets"]:
        added = {"job": "dynamo", "instance": target, **group["labels"]}
        for line in fetch(f"http://{target}/metrics")[1].splitlines():
            if line[:1] != "#":
                match = SAMPLE.match(line)
                assert match is not None, line
                labels = dict(LABEL.findall(match["labels"] or ""))
                assert not labels.keys() & added.keys(), line
                yield Sample(match["name"], labels | added, float(match["value"]))


def ask(port: int, key: str = "") -> None:
    """Request an answer of several tokens with a prompt of several blocks."""
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 4, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        assert b"[DONE]" in response.read()


def nodes(expression: Any, kind: type) -> list[Any]:
    """Return the parts of an expression that are of a kind."""
    parts: list[Any] = []
    promql_parser.walk(expression, lambda n: parts.append(n) if isinstance(n, kind) else None)
    return parts


def select(samples: list[Sample], selector: Any) -> list[Sample]:
    """Return the samples of a selector, with all values of the dashboard's variables."""
    matchers = [
        (matcher.name, re.compile(re.sub(r"\$\w+", ".*", matcher.value)))
        for matcher in selector.matchers.matchers
        if matcher.name != "status"  # of failed requests: there are none
    ]
    return [
        sample
        for sample in samples
        if sample.name == selector.name
        and all(value.fullmatch(sample.labels.get(name, "")) for name, value in matchers)
    ]


def missing_data(query: str, samples: list[Sample]) -> Iterator[str]:
    """Yield why Prometheus would have no value for a query."""
    expression = promql_parser.parse(query.replace("$__rate_interval", "1m"))
    for selector in nodes(expression, promql_parser.VectorSelector):
        selected = select(samples, selector)
        if not selected:
            yield f"{selector.name} has no sample"
        elif selector.name.endswith("_bucket") and not any(sample.value for sample in selected):
            yield f"{selector.name} has counted nothing"
    for division in nodes(expression, promql_parser.BinaryExpr):
        for selector in nodes(division.rhs, promql_parser.VectorSelector):
            if not any(sample.value for sample in select(samples, selector)):
                yield f"{selector.name} is 0, and the query divides by it"
    for aggregate in nodes(expression, promql_parser.AggregateExpr):
        groups = set(aggregate.modifier.labels) if aggregate.modifier else set()
        for selector in nodes(aggregate.expr, promql_parser.VectorSelector):
            for sample in select(samples, selector):
                if not groups <= sample.labels.keys():
                    yield f"{selector.name} has no labels {groups - sample.labels.keys()}"


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("grafana")
    flags = ("--router-mode", "kv", "--router-replicas", "1", "--disagg", "always", "--observer")
    tiers = ("--kv-host-size", "1GB")
    cluster = Cluster(
        tiny_model, folder, workers=0, prefill=1, decode=2, frontends=2, flags=(*flags, *tiers)
    )
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def samples(cluster: Cluster) -> list[Sample]:
    """All samples of a deployment that has answered requests."""
    for _ in range(6):
        ask(cluster.port)
    roles = [
        *("decode_worker", "decode_worker", "frontend", "frontend", "observer", "prefill_worker"),
        *("router", "supervisor"),
    ]
    groups = until(
        lambda: len(listed := list_groups(cluster.port)) == len(roles) and listed, timeout_s=10
    )
    assert sorted(group["labels"]["role"] for group in groups) == roles
    assert all(group["labels"].keys() == TARGET_LABELS for group in groups)
    assert len({target for group in groups for target in group["targets"]}) == len(roles)
    until(lambda: counts_stories(cluster.port), timeout_s=10)
    return [sample for group in groups for sample in scrape(group)]


def counts_stories(port: int) -> bool:
    """Whether the frontends have counted the six requests, which they do once a second."""
    text = fetch(f"http://127.0.0.1:{port}/metrics")[1]
    return 'dynamo_request_longest_gap_seconds_count{model="tiny"} 6' in text


def test_every_query_of_the_dashboards_has_data(samples: list[Sample]) -> None:
    panels = [
        panel for path in FOLDER.glob("*.json") for panel in json.loads(path.read_text())["panels"]
    ]
    queries = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    assert len(panels) >= 35
    missing = [
        f"{title}: {reason}" for title, query in queries for reason in missing_data(query, samples)
    ]
    assert not missing


def test_a_query_without_data_is_noticed(samples: list[Sample]) -> None:
    for query in (
        "sum(rate(dynamo_unknown_total[1m]))",
        "sum by (role, colour) (dynamo_worker_blocks)",
        "sum(dynamo_worker_blocks) / sum(rate(dynamo_worker_preemptions_total[1m]))",
    ):
        assert list(missing_data(query, samples)), query


ALL_ROLES = {"frontend", "router", "observer", "supervisor", "prefill_worker", "decode_worker"}
WORKERS = {"prefill_worker", "decode_worker"}
LABEL_VALUES: list[tuple[str, set[str], str, set[str]]] = [
    *((name, ALL_ROLES, "", set()) for name in ("process_max_fds", "process_threads")),
    ("python_gc_pause_seconds_count", ALL_ROLES - {"supervisor"}, "", set()),
    ("dynamo_loop_stalls_total", ALL_ROLES - {"supervisor"}, "", set()),
    ("dynamo_build_info", ALL_ROLES, "", set()),
    ("dynamo_config_info", ALL_ROLES - {"supervisor"}, "", set()),
    ("dynamo_worker_batch_requests_count", WORKERS, "", set()),
    ("dynamo_worker_step_seconds_count", WORKERS, "", set()),
    ("dynamo_request_longest_gap_seconds_count", {"frontend"}, "", set()),
    ("dynamo_request_recomputed_tokens_total", {"frontend"}, "", set()),
    ("dynamo_request_stage_seconds_count", {"frontend"}, "stage", set(STAGES)),
    ("dynamo_slo_requests_total", {"frontend"}, "slo", {"availability", "ttft", "itl"}),
    ("dynamo_slo_requests_total", {"frontend"}, "outcome", {"good", "bad"}),
    ("dynamo_stories_dropped_total", {"frontend", "router"}, "why", {"too_many", "not_sent"}),
    ("dynamo_alert_active", {"supervisor"}, "alert", {"WorkerLost", "VersionsDiffer"}),
    ("dynamo_model_fetch_failures_total", {"supervisor"}, "source", {"hub", "index", "peer"}),
    ("dynamo_admission_rejected_total", {"frontend"}, "reason", {"queue_full", "ttft", "late"}),
    ("dynamo_frontend_requests_total", {"frontend"}, "status", set(KNOWN_STATUSES)),
    ("dynamo_transfer_failures_total", WORKERS, "reason", set(FAILURES)),
    ("dynamo_worker_prefill_fallbacks_total", {"decode_worker"}, "reason", set(FAILURES)),
    ("dynamo_worker_tier_failures_total", WORKERS, "tier", {"host"}),
    ("dynamo_migrations_total", {"frontend"}, "reason", {"worker_failed", "instance_gone"}),
    ("dynamo_workers_ejected_total", {"frontend"}, "reason", {"failures", "stuck"}),
]


@pytest.mark.parametrize(("name", "roles", "label", "values"), LABEL_VALUES)
def test_each_process_has_its_metrics_and_their_label_values_before_the_first_event(
    samples: list[Sample], name: str, roles: set[str], label: str, values: set[str]
) -> None:
    for role in roles:
        own = [each for each in samples if each.name == name and each.labels["role"] == role]
        assert own, role
        assert values <= {each.labels.get(label, "") for each in own}, role


async def test_the_label_follows_a_role_that_changes(
    cluster: Cluster, samples: list[Sample]
) -> None:
    def role() -> str:
        labels = (group["labels"] for group in list_groups(cluster.port))
        return str(next(each["role"] for each in labels if each["process"] == "decode-worker-2"))

    assert role() == "decode_worker"
    assert {sample.labels["role"] for sample in samples} >= {"decode_worker"}
    await cluster.command("roles", "decode-worker-2", "prefill")
    until(lambda: role() == "prefill_worker", timeout_s=10)
