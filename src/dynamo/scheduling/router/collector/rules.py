"""The rules of good routing: what is measured, from which value on it is wrong, what to do."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynamo.scheduling.router.collector.report import Aggregates, Bottleneck


class RoutingAlertRule(msgspec.Struct, frozen=True):
    """Broken above `threshold`. `where`: aggregator and number; `evidence` takes the value."""

    metric: tuple[str, str]
    threshold: float
    evidence: str
    advice: str


ALERT_RULES: Mapping[str, RoutingAlertRule] = {
    "failures": RoutingAlertRule(
        ("throughput", "failed_ratio"),
        0.01,
        "{:.1%} of what was sent to workers failed there",
        "Look at the logs of the workers, and of the supervisor if they die.",
    ),
    "queueing": RoutingAlertRule(
        ("throughput", "queue_length_mean"),
        4.0,
        "{:.1f} requests wait in the router on average",
        "Add workers: those there are do not keep up.",
    ),
    "routing_loss": RoutingAlertRule(
        ("cache_hit", "routing_loss"),
        0.15,
        "{:.1%} of prompt blocks lie with another worker than the one that was chosen",
        "Holders of hot prefixes are too busy: add workers, or price load lower "
        "(docs/how-to/routing.md).",
    ),
    "eviction_loss": RoutingAlertRule(
        ("cache_hit", "eviction_loss"),
        0.15,
        "{:.1%} of prompt blocks were computed before and are held nowhere any more",
        "Give workers more KV memory, or a tier behind it; choose the `reuse` eviction.",
    ),
    "imbalance": RoutingAlertRule(
        ("load_balance", "imbalance"),
        2.0,
        "the busiest worker computes {:.1f} times the mean",
        "A hot prefix has one holder: price load higher, or choose the `predicted` policy.",
    ),
    "inexact_view": RoutingAlertRule(
        ("cache_hit", "inexact"),
        0.2,
        "{:.1%} of decisions were made without an exact view of the worker's cache",
        "See /health for workers that send no KV events, or whose events are late.",
    ),
    "no_prefix_cache": RoutingAlertRule(
        ("cache_hit", "cacheless"),
        0.01,
        "{:.1%} of prompts went to workers that have no prefix cache",
        "Nothing can be found again there: start them with engine.prefix_caching, or route by "
        "another mode than kv.",
    ),
    "expected_in_vain": RoutingAlertRule(
        ("cache_hit", "expected_in_vain"),
        0.15,
        "{:.1%} of prompt blocks were expected at the worker and were not there",
        "Blocks are evicted while requests wait for them: give workers more KV memory.",
    ),
    "slow_decisions": RoutingAlertRule(
        ("latency", "decision_ms_p99"),
        1000.0,
        "1 in 100 decisions takes {:.0f} ms or more, waiting included",
        "Requests are held in the router: add workers, or let them queue at the workers.",
    ),
    "prediction": RoutingAlertRule(
        ("latency", "ttft_prediction_error"),
        1.0,
        "first tokens come {:.0%} earlier or later than predicted, on average",
        "Calibration is off: it needs some minutes of traffic, or workers share a machine.",
    ),
}


def find_bottlenecks(metrics: Aggregates, thresholds: Mapping[str, float]) -> list[Bottleneck]:
    """The rules that are broken, worst first. `thresholds` replaces those of single rules."""
    found = []
    for name, rule in ALERT_RULES.items():
        aggregator, number = rule.metric
        value = metrics[aggregator].get(number, 0.0)
        threshold = thresholds.get(name, rule.threshold)
        if value > threshold:
            evidence = rule.evidence.format(value)
            found.append(Bottleneck(name, evidence, value, threshold, rule.advice))
    return sorted(found, key=lambda one: one.value / max(one.threshold, 1e-9), reverse=True)
