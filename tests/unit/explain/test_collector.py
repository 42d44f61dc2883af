"""The collector of routing decisions: report, trends, bottlenecks, alerts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.core.errors import InvalidRequest
from dynamo.library.routing_collector import RoutingMetricsCollector
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE
from dynamo.scheduling.router.collector.collector import (
    Alert,
    CollectorConfig,
    PerformanceReport,
)
from dynamo.scheduling.router.collector.report import ALERT_RULES, RoutingRecord
from dynamo.telemetry.logs import request_id


def record(at: float, worker: str = "a", **fields: Any) -> RoutingRecord:
    defaults: dict[str, Any] = {
        "cache_hit_ratio": 0.5,
        "reachable_ratio": 0.5,
        "decision_latency": 0.001,
        "worker_load": 1.0,
        "queue_length": 0,
        "prompt_blocks": 10,
        "ttft_s": 0.1,
    }
    return RoutingRecord(
        timestamp=at, request_id=f"r{at}", selected_worker=worker, **(defaults | fields)
    )


def collector_of(*records: RoutingRecord, wall: float = 100.0) -> RoutingMetricsCollector:
    collector = RoutingMetricsCollector(wall=lambda: wall)
    for each in records:
        collector.record(each)
    return collector


async def test_a_decision_context_of_the_seeds_is_recorded_and_reported() -> None:
    collector = RoutingMetricsCollector(SimpleNamespace(buffer_size=3), wall=lambda: 50.0)
    for number in range(5):
        context = SimpleNamespace(
            request_id=str(number),
            selected_worker=SimpleNamespace(id=f"w{number % 2}"),
            cache_hit_ratio=0.25,
            decision_time=0.002,
            worker_load=0.5,
            queue_length=1,
        )
        await collector.record_routing_decision(context)
    with pytest.raises(InvalidRequest, match="'last hour' is no range of time"):
        await collector.generate_performance_report("last hour")  # type: ignore[arg-type]
    report = await collector.generate_performance_report((0, 100))
    assert isinstance(report, PerformanceReport)
    assert report.raw_data_summary["decisions"] == 3
    assert set(report.aggregated_metrics) == {
        "latency",
        "throughput",
        "cache_hit",
        "load_balance",
    }
    assert report.aggregated_metrics["cache_hit"]["hit"] == pytest.approx(0.25)
    assert report.aggregated_metrics["latency"]["decision_ms_p99"] == pytest.approx(2)


def test_cold_evicted_and_misrouted_blocks_are_distinguished() -> None:
    cold = collector_of(record(1, cache_hit_ratio=0, reachable_ratio=0, seen_ratio=0.05)).report()
    assert cold.bottlenecks == []
    assert cold.aggregated_metrics["cache_hit"]["cold"] == pytest.approx(0.95)

    evicted = collector_of(
        record(1, cache_hit_ratio=0.1, reachable_ratio=0.1, seen_ratio=0.9)
    ).report()
    assert [bottleneck.name for bottleneck in evicted.bottlenecks] == ["eviction_loss"]
    assert "eviction" in evicted.recommendations[0]

    routed = collector_of(
        record(1, cache_hit_ratio=0.1, reachable_ratio=0.8, seen_ratio=0.8)
    ).report()
    assert [bottleneck.name for bottleneck in routed.bottlenecks] == ["routing_loss"]
    assert routed.aggregated_metrics["cache_hit"]["routing_loss"] == pytest.approx(0.7)


def test_trends_compare_the_halves_of_the_range() -> None:
    early = [record(at, cache_hit_ratio=0.2, queue_length=0) for at in range(10)]
    late = [record(50 + at, cache_hit_ratio=0.8, queue_length=3) for at in range(10)]
    report = collector_of(*early, *late, wall=60).report((0, 60))
    assert report.trends["cache_hit_ratio"].direction == "rising"
    assert report.trends["queue_length"].direction == "rising"
    assert report.trends["ttft_ms"].direction == "steady"
    assert any("queue grows" in line for line in report.recommendations)


def test_a_report_covers_its_range() -> None:
    collector = collector_of(record(10), record(20), record(90), wall=100)
    assert collector.report((15, 30)).raw_data_summary["decisions"] == 1
    assert collector.report(15).raw_data_summary["decisions"] == 1
    assert collector.report().raw_data_summary["decisions"] == 3


def test_busy_and_idle_workers_are_reported() -> None:
    records = [record(at, "a", cache_hit_ratio=0) for at in range(9)]
    collector = collector_of(*records, record(9, "b", cache_hit_ratio=0))
    collector.workers = 4
    report = collector.report()
    assert report.aggregated_metrics["load_balance"]["workers_idle"] == 2
    assert report.aggregated_metrics["load_balance"]["imbalance"] == pytest.approx(3.6)
    assert "imbalance" in [bottleneck.name for bottleneck in report.bottlenecks]


def test_an_uneven_distribution_over_idle_workers_is_no_bottleneck() -> None:
    records = [record(at, "a", cache_hit_ratio=0, worker_load=0.0) for at in range(9)]
    collector = collector_of(*records, record(9, "b", cache_hit_ratio=0, worker_load=0.0))
    report = collector.report()
    assert report.aggregated_metrics["load_balance"]["imbalance"] > 1.5
    collector.workers = 4
    names = [bottleneck.name for bottleneck in collector.report().bottlenecks]
    assert "imbalance" not in names


def test_the_log_line_of_an_alert_has_no_request_id(caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str] = []
    collector = RoutingMetricsCollector(
        CollectorConfig(check_s=0.0, min_decisions=2), wall=lambda: 0.0
    )
    collector.on_alert(lambda alert: ids.append(request_id.get()))
    token = request_id.set("innocent")
    try:
        for at in range(3):
            collector.record(record(float(at), failed=True))
        assert request_id.get() == "innocent"
    finally:
        request_id.reset(token)
    assert ids == [""]
    assert "routing alert" in caplog.text


def test_an_alert_is_raised_once_and_ends() -> None:
    alerts: list[Alert] = []
    config = CollectorConfig(
        check_s=1.0, window_s=10.0, min_decisions=2, thresholds={"failures": 0.3}
    )
    collector = RoutingMetricsCollector(config, wall=lambda: 0.0)
    collector.on_alert(alerts.append)
    for at in range(5):
        collector.record(record(float(at), failed=True))
    assert [alert.name for alert in alerts] == ["failures"]
    assert collector.alerts[0].value == 1.0
    assert collector.alert_ratios()["failures",] == pytest.approx(1 / 0.3)
    for at in range(20, 25):
        collector.record(record(float(at)))
    assert collector.alerts == ()
    assert set(collector.alert_ratios().values()) == {0.0}


def test_a_report_without_records() -> None:
    report = collector_of().report()
    assert report.recommendations == []
    assert report.bottlenecks == []


def test_every_rule_has_evidence_and_advice() -> None:
    for rule in ALERT_RULES.values():
        assert rule.evidence.format(1.0)
        assert rule.advice.endswith(".")


def test_every_rule_looks_at_a_metric_that_exists() -> None:
    records = [
        record(at, view=view, seen_ratio=0.5, achieved_ratio=0.5, predicted_ttft_s=0.1)
        for at, view in enumerate(("exact", "stale", NO_PREFIX_CACHE))
    ]
    metrics = collector_of(*records).report().aggregated_metrics
    for name, rule in ALERT_RULES.items():
        aggregator, measure = rule.metric
        assert measure in metrics[aggregator], name


def test_blocks_without_a_look_up_are_not_reachable() -> None:
    """A mode that looks up no overlaps cannot report routing losses."""
    report = collector_of(record(1, cache_hit_ratio=0.4, reachable_ratio=None)).report()
    cache = report.aggregated_metrics["cache_hit"]
    assert cache["hit"] == 0.4
    assert not {"reachable", "routing_loss"} & cache.keys()


def test_prediction_errors_on_fast_first_tokens_are_small() -> None:
    def error(ttft_s: float, predicted_s: float) -> float:
        records = [record(at, ttft_s=ttft_s, predicted_ttft_s=predicted_s) for at in range(30)]
        metrics = collector_of(*records).report().aggregated_metrics
        return metrics["latency"]["ttft_prediction_error"]

    assert error(0.004, 0.023) == pytest.approx(0.19)
    assert error(0.004, 0.404) == pytest.approx(4.0)
    assert error(1.0, 2.5) == pytest.approx(1.5)


def test_workers_without_a_prefix_cache_are_no_losses() -> None:
    """A missing cache loses no blocks, and more memory would not help."""
    records = [
        record(
            float(at),
            cache_hit_ratio=0.0,
            reachable_ratio=0.0,
            seen_ratio=0.9,
            view=NO_PREFIX_CACHE,
        )
        for at in range(20)
    ]
    report = collector_of(*records).report()
    assert report.aggregated_metrics["cache_hit"] == {"hit": 0.0, "inexact": 0.0, "cacheless": 1.0}
    assert [bottleneck.name for bottleneck in report.bottlenecks] == ["no_prefix_cache"]
    mixed = collector_of(*records, *(record(float(at)) for at in range(20, 40))).report()
    cache_hit = mixed.aggregated_metrics["cache_hit"]
    assert (cache_hit["hit"], cache_hit["cacheless"]) == (0.5, 0.5)
