#!/usr/bin/env python3
"""Write the expected outputs of clustering tests, as scikit-learn gives them.

    python scripts/clusters_oracle.py [--out tests/data/oracle/clusters.json]

Needs scikit-learn, in an environment of its own. Inputs are drawn from a fixed seed: sizes of
allocations for k-means (3 clusters of the base-2 logarithms), and requests for DBSCAN (eps .5, two
samples, standardised).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import numpy as np

OUT = Path(__file__).parent.parent / "tests" / "data" / "oracle" / "clusters.json"
CASES, STARTS = 200, 1000


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    rng = random.Random(7)
    cases = {
        "kmeans": [kmeans(rng) for _ in range(CASES)],
        "dbscan": [dbscan(rng) for _ in range(CASES)],
    }
    out.write_text(json.dumps(cases, separators=(",", ":")) + "\n", encoding="utf-8")


def kmeans(rng: random.Random) -> dict[str, list[float]]:
    """Return sizes, and the centers of their logarithms."""
    from sklearn.cluster import KMeans

    means = [rng.uniform(8, 30) for _ in range(rng.randint(1, 5))]
    count = rng.randint(3, 40)
    sizes = [
        max(1, round(2 ** rng.gauss(rng.choice(means), rng.uniform(0, 1)))) for _ in range(count)
    ]
    while len(set(sizes)) < 3:
        sizes.append(sizes[-1] * 2 + 1)
    logs = np.log2(sizes).reshape(-1, 1)
    fitted = KMeans(n_clusters=3, random_state=42, n_init=STARTS, tol=0).fit(logs)
    centers = sorted(fitted.cluster_centers_.flatten().tolist())
    return {"sizes": sizes, "centers": [round(center, 9) for center in centers]}


def dbscan(rng: random.Random) -> dict[str, list[list[float]] | list[int]]:
    """Return requests as (prompt tokens, answer tokens, temperature), and their labels."""
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    kinds = [
        (rng.uniform(4, 9), rng.uniform(3, 7), rng.choice((0.0, 0.7, 1.0)))
        for _ in range(rng.randint(1, 5))
    ]
    points = []
    for _ in range(rng.randint(2, 40)):
        prompt, answer, temperature = rng.choice(kinds)
        spread = rng.uniform(0, 0.4)
        points.append(
            [
                round(math.exp(rng.gauss(prompt, spread))),
                round(math.exp(rng.gauss(answer, spread))),
                temperature,
            ]
        )
    scaled = StandardScaler().fit_transform(np.array(points, float))
    labels = DBSCAN(eps=0.5, min_samples=2).fit_predict(scaled)
    return {"points": points, "labels": labels.tolist()}


if __name__ == "__main__":
    main()
