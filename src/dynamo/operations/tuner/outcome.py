"""The outcome of requests under certain settings, and whether another outcome is better."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from dynamo.operations.planner.values import Promise
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.result import ReplayResult

BROKEN_COST = 10.0
"""A share of broken promises makes the mean time of a request worse by so many times as much."""
SEGMENTS, RESAMPLES = 20, 200
"""A record is resampled by parts of equal duration."""
WORSE, MORE_BROKEN = 0.02, 0.001
"""Changes up to these shares are not worse."""
LOW, HIGH = 5.0, 95.0
MOST_LOSS = 1e6
"""The loss where no request is answered."""
Array = Any
"""An array of float64, with an element a request."""


class Figures(msgspec.Struct, frozen=True):
    """Figures of a set of requests. `cost` is the mean time of a request, more if promises broke.
    `broken` is a share."""

    cost: float
    broken: float
    ttft_p99_s: float
    itl_p99_ms: float


class SettingOutcome(msgspec.Struct, frozen=True, eq=False):
    """The requests of a replay: arrival and latencies of those with an answer, and the arrivals of
    the others. `itl_ms` is the mean of a request."""

    promise: Promise
    arrived_s: Array
    ttft_s: Array
    itl_ms: Array
    e2e_s: Array
    failed_s: Array
    tokens_per_s: float

    @property
    def figures(self) -> Figures:
        """The figures of all requests."""
        return self.sample([slice(None)], len(self.failed_s))

    @property
    def span_s(self) -> tuple[float, float]:
        """The first and the last arrival."""
        arrived_s = np.concatenate([self.arrived_s, self.failed_s])
        return (float(arrived_s.min()), float(arrived_s.max())) if arrived_s.size else (0.0, 0.0)

    def sample(self, parts: list[Any], failed: int) -> Figures:
        """Return the figures of the requests that `parts` index, and of `failed` others."""
        ttft_s, itl_ms, e2e_s = (
            np.concatenate([values[part] for part in parts])
            for values in (self.ttft_s, self.itl_ms, self.e2e_s)
        )
        requests = len(e2e_s) + failed
        if not len(e2e_s):
            return Figures(math.inf, 1.0, math.inf, math.inf)
        late = (ttft_s > self.promise.ttft_s) | (itl_ms > self.promise.itl_ms)
        broken = (int(late.sum()) + failed) / requests
        cost = float(e2e_s.mean()) * (1 + BROKEN_COST * broken)
        p99 = (float(np.percentile(values, 99)) for values in (ttft_s, itl_ms))
        return Figures(cost, broken, *p99)


class Comparison(msgspec.Struct, frozen=True):
    """How much less an outcome costs than another one, with the 5th and the 95th percentile over
    resampled records, and in which share of those nothing is worse (`safety_score`)."""

    gain: float
    low: float
    high: float
    safety_score: float


def replay_outcome(result: ReplayResult, log: ReplayLog, promise: Promise) -> SettingOutcome:
    """Return the outcome of a replay."""
    arrived_s, ttft_s, e2e_s = (
        np.array(values, float) for values in (log.arrived_s, log.ttft_s, log.e2e_s)
    )
    later_tokens = np.maximum(1, np.array(log.tokens, float) - 1)
    itl_ms = (e2e_s - ttft_s) * 1e3 / later_tokens
    failed_s = np.array(log.failed_s, float)
    return SettingOutcome(
        promise, arrived_s, ttft_s, itl_ms, e2e_s, failed_s, result.output_tokens_per_s
    )


def compare(before: SettingOutcome, after: SettingOutcome) -> Comparison:
    """Return how `after` compares with `before` on the same record. Both are resampled alike."""
    old, new = before.figures, after.figures
    draws = np.random.default_rng(0).integers(0, SEGMENTS, (RESAMPLES, SEGMENTS))
    slower = after.tokens_per_s < (1 - WORSE) * before.tokens_per_s
    parts = [_Segments(outcome, before.span_s) for outcome in (before, after)]
    gains, safe = [], 0
    for draw in draws:
        first, second = (segments.sample(draw) for segments in parts)
        gains.append(_gain(first, second))
        safe += not slower and is_safe(first, second, before.promise)
    low, high = (float(np.percentile(gains, percent)) for percent in (LOW, HIGH))
    return Comparison(_gain(old, new), low, high, safe / RESAMPLES)


def is_safe(before: Figures, after: Figures, promise: Promise) -> bool:
    """Whether nothing is worse: no promise, and no 99th percentile that breaks or lacks one."""
    if after.broken > before.broken + MORE_BROKEN:
        return False
    ttft_s = max((1 + WORSE) * before.ttft_p99_s, _finite(promise.ttft_s))
    itl_ms = max((1 + WORSE) * before.itl_p99_ms, _finite(promise.itl_ms))
    return after.ttft_p99_s <= ttft_s and after.itl_p99_ms <= itl_ms


class _Segments:
    """The requests of an outcome by the part of `span_s` in which they arrived."""

    def __init__(self, outcome: SettingOutcome, span_s: tuple[float, float]) -> None:
        self._outcome = outcome
        edges = np.linspace(*span_s, SEGMENTS + 1)[1:-1]
        which = np.searchsorted(edges, outcome.arrived_s, side="right")
        self._members = [np.flatnonzero(which == part) for part in range(SEGMENTS)]
        failed = np.searchsorted(edges, outcome.failed_s, side="right")
        self._failed = np.bincount(failed, minlength=SEGMENTS)

    def sample(self, draw: Array) -> Figures:
        """Return the figures of these segments."""
        failed = int(self._failed[draw].sum())
        return self._outcome.sample([self._members[part] for part in draw], failed)


def _gain(before: Figures, after: Figures) -> float:
    if before.cost == math.inf:
        return float(after.cost < math.inf)
    return max(-MOST_LOSS, 1 - after.cost / before.cost) if before.cost else 0.0


def _finite(limit: float) -> float:
    return limit if math.isfinite(limit) else 0.0
