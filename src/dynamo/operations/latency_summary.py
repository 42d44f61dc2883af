"""Statistics of latencies, shared by `dynamo bench`, `dynamo replay` and the chaos simulation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

CURVE_POINTS = 100
BINS_PER_E_FOLD = 1000.0
"""Logarithmic bins of a LatencyHistogram: neighbours differ by 0.1 %."""


class LatencySummary(msgspec.Struct, frozen=True):
    """Distribution of `n` latencies in milliseconds. `curve` holds 101 values, from the smallest to
    the largest: `curve[k]` is the k-th percentile by nearest rank. `p999` is the 99.9th percentile.
    All is 0 for no latencies."""

    n: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0
    curve: Sequence[float] = ()


class LatencyHistogram:
    """Counts latencies in logarithmic bins, in constant memory."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._sum = 0.0
        self._count = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` latencies of `seconds`."""
        bin_number = round(math.log(seconds) * BINS_PER_E_FOLD) if seconds > 0 else -(1 << 30)
        self._bins[bin_number] = self._bins.get(bin_number, 0) + times
        self._sum += seconds * times
        self._count += times

    def summarize(self) -> LatencySummary:
        """Return the distribution. The mean is exact, percentiles and maximum within 0.1 %."""
        bins = sorted(self._bins)
        counts = list(accumulate(self._bins[bin_number] for bin_number in bins))
        return _summary(
            self._count,
            self._sum,
            (
                math.exp(bins[bisect_right(counts, rank)] / BINS_PER_E_FOLD)
                for rank in _percentile_ranks(self._count)
            ),
        )


def summarize_latencies(seconds: Sequence[float]) -> LatencySummary:
    """Return the distribution of latencies in seconds, in any order."""
    ordered = sorted(seconds)
    values = (ordered[rank] for rank in _percentile_ranks(len(ordered)))
    return _summary(len(ordered), math.fsum(ordered), values)


def _percentile_ranks(count: int) -> Iterable[int]:
    """Ranks, from 0, of the smallest value, every percentile and the 99.9th of `count` values."""
    thousandths = (*range(0, 1001, 1000 // CURVE_POINTS), 999)
    return (max(0, -(-count * thousandth // 1000) - 1) for thousandth in thousandths)


def _summary(count: int, total_s: float, percentiles_s: Iterable[float]) -> LatencySummary:
    if not count:
        return LatencySummary()
    *curve, p999 = (round(value * 1e3, 3) for value in percentiles_s)
    mean = round(total_s / count * 1e3, 3)
    return LatencySummary(
        count, mean, curve[50], curve[90], curve[95], curve[99], p999, curve[100], curve
    )
