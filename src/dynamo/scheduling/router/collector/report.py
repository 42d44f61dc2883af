"""From decisions to a report: aggregates, trends, what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Literal

import msgspec

from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE
from dynamo.scheduling.router.collector.record import RoutingRecord

Aggregates = dict[str, dict[str, float]]
Records = Sequence[RoutingRecord]

STEADY_SHARE = 0.1
"""A change smaller than this share is none."""
TTFT_ERROR_FLOOR_S = 0.1
"""First tokens sooner than this are soon, however much sooner or later they were expected: an error
in predicting them counts as a share of this."""
MIN_HALF_RECORDS = 5
"""Decisions that each half of a trend needs."""


class Trend(msgspec.Struct, frozen=True):
    """The second half of the time against the first."""

    direction: Literal["rising", "falling", "steady"]
    before: float
    after: float


class Bottleneck(msgspec.Struct, frozen=True):
    """A rule that is broken. `advice`: what to do."""

    name: str
    evidence: str
    value: float
    threshold: float
    advice: str


def aggregate(records: Records, seconds: float, workers: int = 0) -> Aggregates:
    """Every aggregator's numbers; times in milliseconds."""
    return {
        "latency": latency(records),
        "throughput": throughput(records, seconds),
        "cache_hit": cache_hit(records),
        "load_balance": load_balance(records, workers),
    }


def latency(records: Records) -> dict[str, float]:
    """Of decisions, of first tokens, and how far off first tokens were predicted."""
    decisions = [one.decision_latency * 1e3 for one in records]
    firsts = [one.ttft_s * 1e3 for one in records if one.ttft_s is not None]
    errors = [
        abs(one.predicted_ttft_s - one.ttft_s) / max(one.ttft_s, TTFT_ERROR_FLOOR_S)
        for one in records
        if one.ttft_s is not None and one.predicted_ttft_s is not None
    ]
    return {
        **_percentiles("decision_ms", decisions),
        **_percentiles("ttft_ms", firsts),
        "ttft_prediction_error": fmean(errors) if errors else 0.0,
    }


def throughput(records: Records, seconds: float) -> dict[str, float]:
    """Rates over `seconds`."""
    count = len(records)
    seconds = max(seconds, 1e-9)
    return {
        "requests": count,
        "requests_per_s": count / seconds,
        "output_tokens_per_s": sum(one.output_tokens for one in records) / seconds,
        "failed_ratio": sum(one.failed for one in records) / count if count else 0.0,
        "queue_length_mean": fmean(one.queue_length for one in records) if records else 0.0,
        "queue_length_max": max((one.queue_length for one in records), default=0),
    }


def cache_hit(records: Records) -> dict[str, float]:
    """Shares of prompt blocks. What was asked for before and is nowhere any more was lost to
    eviction; what lies with another worker than the chosen one, to routing; the rest is cold.
    `cacheless`: share of prompts that went to workers without a prefix cache; they count nowhere
    else."""
    caching = [one for one in records if one.view != NO_PREFIX_CACHE]
    found = _hit_shares(caching)
    if len(caching) < len(records):
        found["cacheless"] = 1.0 - len(caching) / len(records)
    return found


def _hit_shares(records: Records) -> dict[str, float]:
    """`cache_hit` of workers that have a cache."""
    blocks = sum(one.prompt_blocks for one in records)
    if not blocks:
        return {"hit": 0.0, "inexact": 0.0}
    hit = sum(one.cache_hit_ratio * one.prompt_blocks for one in records) / blocks
    inexact = sum(one.view in {"stale", "approximate"} for one in records) / len(records)
    found = {
        "hit": hit,
        "inexact": inexact,
        **_reachable_shares(records),
        **_achieved_shares(records),
    }
    known = [one for one in records if one.seen_ratio is not None]
    if known:
        of = sum(one.prompt_blocks for one in known)
        seen = sum((one.seen_ratio or 0.0) * one.prompt_blocks for one in known) / max(of, 1)
        reachable = found.get("reachable", hit)
        seen = max(seen, reachable)
        found |= {"seen": seen, "eviction_loss": seen - reachable, "cold": 1.0 - seen}
    return found


def _reachable_shares(records: Records) -> dict[str, float]:
    """What the best holders held, of prompts of which somebody looked who holds them."""
    known = [one for one in records if one.reachable_ratio is not None]
    of = sum(one.prompt_blocks for one in known)
    if not of:
        return {}
    hit = sum(one.cache_hit_ratio * one.prompt_blocks for one in known) / of
    best = sum((one.reachable_ratio or 0.0) * one.prompt_blocks for one in known) / of
    return {"reachable": max(hit, best), "routing_loss": max(0.0, best - hit)}


def _achieved_shares(records: Records) -> dict[str, float]:
    """What engines found, of prompts that were computed; and what was expected there in vain."""
    done = [one for one in records if one.achieved_ratio is not None and one.ttft_s is not None]
    of = sum(one.prompt_blocks for one in done)
    if not of:
        return {}
    hit = sum(one.cache_hit_ratio * one.prompt_blocks for one in done) / of
    achieved = sum((one.achieved_ratio or 0.0) * one.prompt_blocks for one in done) / of
    return {"achieved": achieved, "expected_in_vain": max(0.0, hit - achieved)}


def load_balance(records: Records, workers: int = 0) -> dict[str, float]:
    """How evenly prompts' uncached blocks and requests lie. `imbalance`: the busiest over mean."""
    counts = Counter(one.selected_worker for one in records)
    work: Counter[str] = Counter()
    for one in records:
        new = one.prompt_blocks * (1.0 - one.cache_hit_ratio)
        work[one.selected_worker] += int(new * 1000)
    known = max(workers, len(counts))
    idle = [0.0] * (known - len(counts))
    return {
        "workers": known,
        "workers_idle": len(idle),
        "request_imbalance": _imbalance([*map(float, counts.values()), *idle]),
        "imbalance": _imbalance([*map(float, work.values()), *idle]),
        "load_mean": fmean(one.worker_load for one in records) if records else 0.0,
        "load_spread": pstdev(one.worker_load for one in records) if records else 0.0,
    }


TREND_MEASURES: Mapping[str, Callable[[Records, float], float]] = {
    "cache_hit_ratio": lambda records, _: cache_hit(records)["hit"],
    "decision_ms": lambda records, _: latency(records)["decision_ms_mean"],
    "ttft_ms": lambda records, _: latency(records)["ttft_ms_mean"],
    "requests_per_s": lambda records, seconds: len(records) / max(seconds, 1e-9),
    "queue_length": lambda records, _: throughput(records, 1.0)["queue_length_mean"],
}


def compute_trends(records: Records, start: float, end: float) -> dict[str, Trend]:
    """What rises and what falls; empty while there is too little to tell."""
    middle = (start + end) / 2
    before = [one for one in records if one.timestamp < middle]
    after = [one for one in records if one.timestamp >= middle]
    if min(len(before), len(after)) < MIN_HALF_RECORDS:
        return {}
    half = (end - start) / 2
    return {
        name: _trend(measure(before, half), measure(after, half))
        for name, measure in TREND_MEASURES.items()
    }


def recommend(
    metrics: Aggregates, tendencies: Mapping[str, Trend], found: Sequence[Bottleneck]
) -> list[str]:
    """What to do, most urgent first; one line that all is well where it is."""
    advice = [one.advice for one in found]
    queue = tendencies.get("queue_length")
    if queue is not None and queue.direction == "rising" and queue.after >= 1:
        advice.append("The queue grows: add workers before requests are rejected.")
    if not advice and metrics["throughput"]["requests"]:
        advice.append("Nothing to do: no rule is broken.")
    return advice


def summarize(records: Records) -> dict[str, Any]:
    """What a report was made of."""
    return {
        "decisions": len(records),
        "first": records[0].timestamp if records else None,
        "last": records[-1].timestamp if records else None,
        "by_worker": dict(Counter(one.selected_worker for one in records)),
        "failed": sum(one.failed for one in records),
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
