"""Clusters of numbers and of points: exact k-means on a line, and DBSCAN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, pstdev

NOISE = -1
"""The label of points that belong to no cluster."""
EPS, MIN_SAMPLES = 0.5, 2
Point = Sequence[float]


def cluster_centers(values: Sequence[float], count: int) -> list[float]:
    """Return the centers of the `count` clusters with the least sum of squared distances, in
    ascending order; fewer if there are fewer different values. Clusters of numbers are intervals,
    so that the best of all is found. Raises `ValueError` without values."""
    weights = sorted(Counter(values).items())
    if not weights:
        raise ValueError("there are no values to cluster")
    sums = _Sums(weights)
    size, count = len(weights), min(count, len(weights))
    costs = [sums.cost(0, end) for end in range(size + 1)]
    cuts: list[list[int]] = []
    for clusters in range(2, count + 1):
        costs, cut = _add_cluster(costs, sums, clusters)
        cuts.append(cut)
    ends = [size]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    begins = [*reversed(ends[1:]), size]
    return [sums.mean(begin, end) for begin, end in zip([0, *begins], begins, strict=False)]


class _Sums:
    """Sums over intervals of weighted values."""

    def __init__(self, weights: Sequence[tuple[float, int]]) -> None:
        middle = fmean(value for value, _ in weights)  # keeps differences of squares exact
        self._middle = middle
        self._counts = [0, *accumulate(weight for _, weight in weights)]
        self._totals = [0.0, *accumulate((value - middle) * weight for value, weight in weights)]
        self._squares = [
            0.0, *accumulate((value - middle) ** 2 * weight for value, weight in weights)
        ]  # fmt: skip

    def cost(self, begin: int, end: int) -> float:
        """Return the squared distances of an interval to its mean."""
        count = self._counts[end] - self._counts[begin]
        total = self._totals[end] - self._totals[begin]
        return self._squares[end] - self._squares[begin] - (total * total / count if count else 0.0)

    def mean(self, begin: int, end: int) -> float:
        """Return the mean of an interval."""
        total = self._totals[end] - self._totals[begin]
        return self._middle + total / (self._counts[end] - self._counts[begin])


def _add_cluster(
    costs: Sequence[float], sums: _Sums, clusters: int
) -> tuple[list[float], list[int]]:
    """Return the least cost of the first values with one cluster more, and where that begins. The
    begin never moves left as values are added, so half of the values bound the others."""
    size = len(costs) - 1
    best, cuts = [math.inf] * (size + 1), [0] * (size + 1)
    pending = [(clusters, size, clusters - 1, size - 1)]
    while pending:
        low, high, first, last = pending.pop()
        if low > high:
            continue
        end = (low + high) // 2
        begins = range(first, min(last, end - 1) + 1)
        cut = min(begins, key=lambda begin: costs[begin] + sums.cost(begin, end))
        best[end], cuts[end] = costs[cut] + sums.cost(cut, end), cut
        pending += [(low, end - 1, first, cut), (end + 1, high, cut, last)]
    return best, cuts


def standardize(points: Sequence[Point]) -> list[list[float]]:
    """Return points whose coordinates have mean 0 and standard deviation 1, or are all 0."""
    columns = list(zip(*points, strict=True))
    means = [fmean(column) for column in columns]
    scales = [pstdev(column, mean) or 1.0 for column, mean in zip(columns, means, strict=True)]
    return [
        [(value - mean) / scale for value, mean, scale in zip(point, means, scales, strict=True)]
        for point in points
    ]


def density_clusters(
    points: Sequence[Point], eps: float = EPS, min_samples: int = MIN_SAMPLES
) -> list[int]:
    """Return the DBSCAN label of each point. Points with `min_samples` points within `eps`, itself
    among them, belong to the cluster of all those; points near none of them are `NOISE`."""
    near = [
        [other for other, there in enumerate(points) if math.dist(here, there) <= eps]
        for here in points
    ]
    labels, label = [NOISE] * len(points), 0
    for start, neighbours in enumerate(near):
        if labels[start] != NOISE or len(neighbours) < min_samples:
            continue
        pending = [start]
        while pending:
            point = pending.pop()
            if labels[point] == NOISE:
                labels[point] = label
                if len(near[point]) >= min_samples:
                    pending += [other for other in near[point] if labels[other] == NOISE]
        label += 1
    return labels
