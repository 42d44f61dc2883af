"""What a replay says at its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

BINS_PER_E_FOLD = 1000.0
"""Gaps are counted by their logarithm, in steps of 0.1 %."""


class ReplayDistribution(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class ReplayResult(msgspec.Struct, frozen=True):
    """`rejected`: those of `errors` that were turned away; times are of those completed.
    `reuse_first_admission`: share of prompt tokens that a cache held when their request was first
    admitted; `tpot_ms`: a request's mean time between tokens, `itl_ms`: every single one;
    `duration_s`: virtual; `requests_per_worker`: per rank, where workers have several; `wall_s`,
    `cpu_s`: what the replay took."""

    trace: str
    settings: Mapping[str, object]
    requests: int
    completed: int
    rejected: int
    reuse_first_admission: float
    ttft_ms: ReplayDistribution
    tpot_ms: ReplayDistribution
    itl_ms: ReplayDistribution
    e2e_ms: ReplayDistribution
    output_tokens_per_s: float
    duration_s: float
    preemptions: int
    evictions: int
    requests_per_worker: Sequence[int]
    errors: Mapping[str, int]
    wall_s: float
    cpu_s: float


class InterTokenHistogram:
    """Times between tokens, counted."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._sum = 0.0
        self._count = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """`times` gaps of `seconds`."""
        at = round(math.log(seconds) * BINS_PER_E_FOLD) if seconds > 0 else -(1 << 30)
        self._bins[at] = self._bins.get(at, 0) + times
        self._sum += seconds * times
        self._count += times

    def summarize(self) -> ReplayDistribution:
        """Percentiles within 0.1 %."""
        if not self._count:
            return ReplayDistribution(0.0, 0.0, 0.0, 0.0)
        points = [self._quantile(share) for share in (0.5, 0.9, 0.99)]
        return ReplayDistribution(_ms(self._sum / self._count), *map(_ms, points))

    def _quantile(self, share: float) -> float:
        left = round((self._count - 1) * share)
        for at in sorted(self._bins):
            left -= self._bins[at]
            if left < 0:
                return math.exp(at / BINS_PER_E_FOLD)
        return 0.0


def summarize_distribution(seconds: array[float]) -> ReplayDistribution:
    """The distribution of times in seconds."""
    if not seconds:
        return ReplayDistribution(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(seconds)
    last = len(ordered) - 1
    points = [ordered[round(last * share)] for share in (0.5, 0.9, 0.99)]
    return ReplayDistribution(_ms(mean(ordered)), *map(_ms, points))


def mean(values: Sequence[float]) -> float:
    """Arithmetic; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def count_values(values: Iterable[str]) -> dict[str, int]:
    """How often each."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
