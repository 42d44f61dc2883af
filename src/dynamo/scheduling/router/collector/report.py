"""Routing records, and what is computed from them: aggregates, trends, broken rules, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Literal

import msgspec

from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE


class RoutingRecord(msgspec.Struct, frozen=True, array_like=True):
    """A decision with its outcome. Shares of the prompt's blocks: held by the chosen worker
    (`cache_hit_ratio`), held by the best worker (`reachable_ratio`, None if not looked up),
    computed before (`seen_ratio`, None if not known). `achieved_ratio`: share of the prompt's
    tokens that the engine found in its cache. `timestamp`: Unix time. `decision_latency`: seconds,
    including the wait in the router. `worker_load`: requests at the chosen worker. `view`: mode of
    its cache view. `ttft_s`: None without a token."""

    timestamp: float
    request_id: str
    selected_worker: str
    cache_hit_ratio: float
    decision_latency: float
    worker_load: float
    queue_length: int
    prompt_blocks: int = 1
    reachable_ratio: float | None = None
    seen_ratio: float | None = None
    achieved_ratio: float | None = None
    view: str = ""
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    output_tokens: int = 0
    failed: bool = False


pack_record = msgspec.msgpack.Encoder().encode
unpack_record = msgspec.msgpack.Decoder(RoutingRecord).decode


Aggregates = dict[str, dict[str, float]]
Records = Sequence[RoutingRecord]

STEADY_SHARE = 0.1
"""Share of change up to which a trend counts as steady."""
TTFT_ERROR_FLOOR_S = 0.1
"""Smallest time that a prediction error is divided by: errors on fast first tokens are harmless."""
MIN_HALF_RECORDS = 5
"""Records that each half of a trend needs."""


class Trend(msgspec.Struct, frozen=True):
    """The second half of a time range compared with the first."""

    direction: Literal["rising", "falling", "steady"]
    before: float
    after: float


class Bottleneck(msgspec.Struct, frozen=True):
    """A broken rule, with the measured value and the advice."""

    name: str
    evidence: str
    value: float
    threshold: float
    advice: str


def aggregate(records: Records, seconds: float, workers: int = 0) -> Aggregates:
    """Return the values of every aggregator; times are in milliseconds."""
    return {
        "latency": latency(records),
        "throughput": throughput(records, seconds),
        "cache_hit": cache_hit(records),
        "load_balance": load_balance(records, workers),
    }


def latency(records: Records) -> dict[str, float]:
    """Return the latency of decisions and first tokens, and the mean prediction error."""
    decisions = [record.decision_latency * 1e3 for record in records]
    firsts = [record.ttft_s * 1e3 for record in records if record.ttft_s is not None]
    errors = [
        abs(record.predicted_ttft_s - record.ttft_s) / max(record.ttft_s, TTFT_ERROR_FLOOR_S)
        for record in records
        if record.ttft_s is not None and record.predicted_ttft_s is not None
    ]
    return {
        **_percentiles("decision_ms", decisions),
        **_percentiles("ttft_ms", firsts),
        "ttft_prediction_error": fmean(errors) if errors else 0.0,
    }


def throughput(records: Records, seconds: float) -> dict[str, float]:
    """Return rates over `seconds` and the queue's length."""
    count = len(records)
    seconds = max(seconds, 1e-9)
    return {
        "requests": count,
        "requests_per_s": count / seconds,
        "output_tokens_per_s": sum(record.output_tokens for record in records) / seconds,
        "failed_ratio": sum(record.failed for record in records) / count if count else 0.0,
        "queue_length_mean": fmean(record.queue_length for record in records) if records else 0.0,
        "queue_length_max": max((record.queue_length for record in records), default=0),
    }


def cache_hit(records: Records) -> dict[str, float]:
    """Return shares of prompt blocks. Blocks that were seen before and are not held now are lost to
    eviction. Blocks held by another worker than the chosen one are lost to routing. The rest is
    cold. Prompts sent to workers without a prefix cache count in `cacheless` alone."""
    caching = [record for record in records if record.view != NO_PREFIX_CACHE]
    shares = _hit_shares(caching)
    if len(caching) < len(records):
        shares["cacheless"] = 1.0 - len(caching) / len(records)
    return shares


def _hit_shares(records: Records) -> dict[str, float]:
    """Return `cache_hit` for records of workers with a prefix cache."""
    blocks = sum(record.prompt_blocks for record in records)
    if not blocks:
        return {"hit": 0.0, "inexact": 0.0}
    hit = sum(record.cache_hit_ratio * record.prompt_blocks for record in records) / blocks
    inexact = sum(record.view in {"stale", "approximate"} for record in records) / len(records)
    shares = {
        "hit": hit,
        "inexact": inexact,
        **_reachable_shares(records),
        **_achieved_shares(records),
    }
    known = [record for record in records if record.seen_ratio is not None]
    if known:
        total = max(sum(record.prompt_blocks for record in known), 1)
        seen = sum((record.seen_ratio or 0.0) * record.prompt_blocks for record in known) / total
        reachable = shares.get("reachable", hit)
        seen = max(seen, reachable)
        shares |= {"seen": seen, "eviction_loss": seen - reachable, "cold": 1.0 - seen}
    return shares


def _reachable_shares(records: Records) -> dict[str, float]:
    """Return the share held by the best worker, over prompts whose overlaps were looked up."""
    known = [record for record in records if record.reachable_ratio is not None]
    total = sum(record.prompt_blocks for record in known)
    if not total:
        return {}
    hit = sum(record.cache_hit_ratio * record.prompt_blocks for record in known) / total
    best = sum((record.reachable_ratio or 0.0) * record.prompt_blocks for record in known) / total
    return {"reachable": max(hit, best), "routing_loss": max(0.0, best - hit)}


def _achieved_shares(records: Records) -> dict[str, float]:
    """Return the share that engines found in their caches, and the share that was expected there
    and missing, over prompts that were computed."""
    done = [
        record
        for record in records
        if record.achieved_ratio is not None and record.ttft_s is not None
    ]
    total = sum(record.prompt_blocks for record in done)
    if not total:
        return {}
    hit = sum(record.cache_hit_ratio * record.prompt_blocks for record in done) / total
    achieved = sum((record.achieved_ratio or 0.0) * record.prompt_blocks for record in done) / total
    return {"achieved": achieved, "expected_in_vain": max(0.0, hit - achieved)}


def load_balance(records: Records, workers: int = 0) -> dict[str, float]:
    """Return how evenly requests and uncached blocks are distributed. `imbalance` is the busiest
    worker's uncached blocks over the mean."""
    counts = Counter(record.selected_worker for record in records)
    work: Counter[str] = Counter()
    for record in records:
        new = record.prompt_blocks * (1.0 - record.cache_hit_ratio)
        work[record.selected_worker] += int(new * 1000)
    known = max(workers, len(counts))
    idle = [0.0] * (known - len(counts))
    return {
        "workers": known,
        "workers_idle": len(idle),
        "request_imbalance": _imbalance([*map(float, counts.values()), *idle]),
        "imbalance": _imbalance([*map(float, work.values()), *idle]),
        "load_mean": fmean(record.worker_load for record in records) if records else 0.0,
        "load_spread": pstdev(record.worker_load for record in records) if records else 0.0,
    }


TREND_MEASURES: Mapping[str, Callable[[Records, float], float]] = {
    "cache_hit_ratio": lambda records, _: cache_hit(records)["hit"],
    "decision_ms": lambda records, _: latency(records)["decision_ms_mean"],
    "ttft_ms": lambda records, _: latency(records)["ttft_ms_mean"],
    "requests_per_s": lambda records, seconds: len(records) / max(seconds, 1e-9),
    "queue_length": lambda records, _: throughput(records, 1.0)["queue_length_mean"],
}


def compute_trends(records: Records, start: float, end: float) -> dict[str, Trend]:
    """Return the trend of each measure; empty with too few records."""
    middle = (start + end) / 2
    before = [record for record in records if record.timestamp < middle]
    after = [record for record in records if record.timestamp >= middle]
    if min(len(before), len(after)) < MIN_HALF_RECORDS:
        return {}
    half = (end - start) / 2
    return {
        name: _trend(measure(before, half), measure(after, half))
        for name, measure in TREND_MEASURES.items()
    }


def recommend(
    metrics: Aggregates, trends: Mapping[str, Trend], bottlenecks: Sequence[Bottleneck]
) -> list[str]:
    """Return advice, most urgent first; a single line if no rule is broken."""
    advice = [bottleneck.advice for bottleneck in bottlenecks]
    queue = trends.get("queue_length")
    if queue is not None and queue.direction == "rising" and queue.after >= 1:
        advice.append("The queue grows: add workers before requests are rejected.")
    if not advice and metrics["throughput"]["requests"]:
        advice.append("No action is needed: no rule is broken.")
    return advice


def summarize(records: Records) -> dict[str, Any]:
    """Return counts and the time range of the records of a report."""
    return {
        "decisions": len(records),
        "first": records[0].timestamp if records else None,
        "last": records[-1].timestamp if records else None,
        "by_worker": dict(Counter(record.selected_worker for record in records)),
        "failed": sum(record.failed for record in records),
    }


def _trend(before: float, after: float) -> Trend:
    size = max(abs(before), abs(after))
    if abs(after - before) <= STEADY_SHARE * size:
        return Trend("steady", before, after)
    return Trend("rising" if after > before else "falling", before, after)


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    values = sorted(values) or [0.0]
    last = len(values) - 1
    return {
        f"{name}_mean": fmean(values),
        f"{name}_p50": values[last // 2],
        f"{name}_p99": values[round(last * 0.99)],
    }


def _imbalance(values: list[float]) -> float:
    mean = fmean(values) if values else 0.0
    return max(values) / mean if mean else 1.0


class RoutingAlertRule(msgspec.Struct, frozen=True):
    """A rule that is broken above `threshold`. `metric` names the aggregator and its measure;
    `evidence` is a format string for the value. The rule holds while workers have fewer requests
    than `min_load` on average when a decision is made. Sentences of `advice_where` hold for the
    settings `key=value`."""

    metric: tuple[str, str]
    threshold: float
    evidence: str
    advice: str
    min_load: float = 0.0
    advice_where: Mapping[str, str] = {}

    @property
    def whole_advice(self) -> str:
        """The advice for any settings."""
        return " ".join([self.advice, *(f"With {k}: {s}" for k, s in self.advice_where.items())])


COMPOSITE = "router.policy=composite"


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
        "Workers with hot prefixes are too busy: add workers.",
        advice_where={COMPOSITE: "Or lower router.routing_strategy.load_weight."},
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
        "One worker holds a hot prefix: add workers, which will hold the prefix, too.",
        min_load=1.0,
        advice_where={COMPOSITE: "Or raise router.routing_strategy.load_weight."},
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
            bottlenecks.append(Bottleneck(name, evidence, value, threshold, rule.whole_advice))
    return sorted(
        bottlenecks, key=lambda broken: broken.value / max(broken.threshold, 1e-9), reverse=True
    )
