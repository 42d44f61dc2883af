"""Statistics of latencies, shared by `dynamo bench`, `dynamo replay` and the chaos simulation."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

CURVE_POINTS = 100
BINS_PER_E_FOLD = 1000.0
"""Logarithmic bins of a LatencyHistogram: neighbours differ by 0.1 %."""
ZERO_BIN = -(1 << 30)
COUNTED_TOGETHER = 1 << 11


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
    """Counts latencies in logarithmic bins, in constant memory. New ones are counted together."""

    def __init__(self) -> None:
        self._bins = Counter[int]()
        self._sum = 0.0
        self._count = 0
        self._seconds, self._times = array("d"), array("q")

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` latencies of `seconds`."""
        self._seconds.append(seconds)
        self._times.append(times)
        if len(self._times) >= COUNTED_TOGETHER:
            self._count_new()

    def add_gaps(self, ends: Any, times: int) -> None:
        """Count `times` latencies between each of the array `ends` and the one before, in
        seconds."""
        self._seconds.frombytes((ends[1:] - ends[:-1]).tobytes())
        self._times.extend(array("q", (times,)) * (len(ends) - 1))
        if len(self._times) >= COUNTED_TOGETHER:
            self._count_new()

    def _count_new(self) -> None:
        import numpy as np

        seconds, times = np.array(self._seconds), np.array(self._times)
        self._seconds, self._times = array("d"), array("q")
        self._sum += float(seconds @ times)
        self._count += int(times.sum())
        positive = seconds > 0
        numbers = np.rint(np.log(seconds[positive]) * BINS_PER_E_FOLD).astype(np.int64)
        lowest = int(numbers.min(initial=0))
        counts = np.bincount(numbers - lowest, times[positive])
        filled = np.flatnonzero(counts)
        bins = self._bins
        for number, count in zip((filled + lowest).tolist(), counts[filled].tolist(), strict=True):
            bins[number] += int(count)
        if zeros := int(times[~positive].sum()):
            bins[ZERO_BIN] += zeros

    def summarize(self) -> LatencySummary:
        """Return the distribution. The mean is exact, percentiles and maximum within 0.1 %."""
        self._count_new()
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
