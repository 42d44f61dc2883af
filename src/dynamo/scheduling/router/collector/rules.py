"""The alert rules for routing: a measure, its threshold and the advice when it is exceeded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynamo.scheduling.router.collector.report import Aggregates, Bottleneck


class RoutingAlertRule(msgspec.Struct, frozen=True):
    """A rule that is broken above `threshold`. `metric` names the aggregator and its measure;
    `evidence` is a format string for the value. The rule holds while workers have fewer requests
    than `min_load` on average when a decision is made."""

    metric: tuple[str, str]
    threshold: float
    evidence: str
    advice: str
    min_load: float = 0.0


ALERT_RULES: Mapping[str, RoutingAlertRule] = {
    "failures": RoutingAlertRule(
        ("throughput", "failed_ratio"),
        0.01,
        "{:.1%} of the requests sent to workers failed there",
        "Read the logs of the workers, and of the supervisor if workers die.",
    ),
    "queueing": RoutingAlertRule(
        ("throughput", "queue_length_mean"),
        4.0,
        "{:.1f} requests wait in the router on average",
        "Add workers: the present ones do not keep up.",
    ),
    "routing_loss": RoutingAlertRule(
        ("cache_hit", "routing_loss"),
        0.15,
        "{:.1%} of prompt blocks are held by another worker than the chosen one",
        "Workers with hot prefixes are too busy: add workers, or, with the policy composite, lower "
        "router.routing_strategy.load_weight.",
    ),
    "eviction_loss": RoutingAlertRule(
        ("cache_hit", "eviction_loss"),
        0.15,
        "{:.1%} of prompt blocks were computed before and are not held by any worker now",
        "Give workers more KV memory or a memory tier, or choose the `reuse` eviction.",
    ),
    "imbalance": RoutingAlertRule(
        ("load_balance", "imbalance"),
        2.0,
        "the busiest worker computes {:.1f} times the mean",
        "One worker holds a hot prefix: add workers, which will hold the prefix, too, or, with the "
        "policy composite, raise router.routing_strategy.load_weight.",
        min_load=1.0,
    ),
    "inexact_view": RoutingAlertRule(
        ("cache_hit", "inexact"),
        0.2,
        "{:.1%} of decisions were made without an exact view of the worker's cache",
        "See /health for workers that send no KV events or send them late.",
    ),
    "no_prefix_cache": RoutingAlertRule(
        ("cache_hit", "cacheless"),
        0.01,
        "{:.1%} of prompts went to workers that have no prefix cache",
        "These workers reuse no prompt: start them with engine.prefix_caching, or route by another "
        "mode than kv.",
    ),
    "expected_in_vain": RoutingAlertRule(
        ("cache_hit", "expected_in_vain"),
        0.15,
        "{:.1%} of prompt blocks were expected at the worker and were missing",
        "Blocks are evicted while requests wait for them: give workers more KV memory.",
    ),
    "slow_decisions": RoutingAlertRule(
        ("latency", "decision_ms_p99"),
        1000.0,
        "1 in 100 decisions takes {:.0f} ms or more, with the wait in the router",
        "The router holds requests: add workers, or let requests queue at the workers.",
    ),
    "prediction": RoutingAlertRule(
        ("latency", "ttft_prediction_error"),
        1.0,
        "first tokens come {:.0%} earlier or later than predicted, on average",
        "Wait for some minutes of traffic if workers are new; else give each worker its own cores.",
    ),
}


def find_bottlenecks(metrics: Aggregates, thresholds: Mapping[str, float]) -> list[Bottleneck]:
    """Return the broken rules, worst first. `thresholds` overrides single rules by name."""
    bottlenecks = []
    for name, rule in ALERT_RULES.items():
        aggregator, measure = rule.metric
        value = metrics[aggregator].get(measure, 0.0)
        threshold = thresholds.get(name, rule.threshold)
        if value > threshold and metrics["load_balance"]["load_mean"] >= rule.min_load:
            evidence = rule.evidence.format(value)
            bottlenecks.append(Bottleneck(name, evidence, value, threshold, rule.advice))
    return sorted(
        bottlenecks, key=lambda broken: broken.value / max(broken.threshold, 1e-9), reverse=True
    )
