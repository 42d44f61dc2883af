"""Clusters equal those that scikit-learn finds (tests/data/oracle/clusters.json)."""

from __future__ import annotations

import json
import math
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.scheduling.router.clustering import (
    NOISE,
    cluster_centers,
    density_clusters,
    standardize,
)

CASES: Any = json.loads(
    (Path(__file__).parents[2] / "data" / "oracle" / "clusters.json").read_text()
)


def test_centers_are_those_of_k_means() -> None:
    assert len(CASES["kmeans"]) == 200
    for case in CASES["kmeans"]:
        logs = [math.log2(size) for size in case["sizes"]]
        assert cluster_centers(logs, 3) == pytest.approx(case["centers"], abs=1e-8)


def test_labels_are_those_of_dbscan() -> None:
    assert len(CASES["dbscan"]) == 200
    for case in CASES["dbscan"]:
        assert density_clusters(standardize(case["points"])) == case["labels"]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_no_other_intervals_are_closer(values: list[int], count: int) -> None:
    centers = cluster_centers(values, count)
    assert len(centers) == min(count, len(set(values)))
    assert centers == sorted(centers)
    ordered = sorted(values)

    def cost(parts: list[list[int]]) -> float:
        return sum(
            sum((value - sum(part) / len(part)) ** 2 for value in part) for part in parts if part
        )

    ends = combinations_with_replacement(range(len(ordered) + 1), count - 1)
    best = min(
        cost([ordered[a:b] for a, b in zip((0, *cut), (*cut, len(ordered)), strict=True)])
        for cut in ends
    )
    ours = sum(min((value - center) ** 2 for center in centers) for value in values)
    assert ours == pytest.approx(best, abs=1e-6)


def test_values_without_a_cluster() -> None:
    with pytest.raises(ValueError, match="no values"):
        cluster_centers([], 3)
    assert density_clusters([]) == []
    assert density_clusters([[0.0], [9.0]]) == [NOISE, NOISE]
    assert standardize([[1.0, 5.0], [3.0, 5.0]]) == [[-1.0, 0.0], [1.0, 0.0]]
