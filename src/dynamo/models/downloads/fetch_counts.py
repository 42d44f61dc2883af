"""Counts of what this process has fetched of models, by source: metrics of workers, stores and
supervisors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial

from dynamo.telemetry import Registry

PEER = "peer"


SOURCES = ("hub", "bucket", "folder", "index", PEER)
"""Kinds of sources, whose series begin at 0. "index" is one of packages."""


class FetchCounts:
    """Bytes, seconds and failures by source."""

    def __init__(self) -> None:
        self.size_bytes = Counter(dict.fromkeys(SOURCES, 0))
        self.seconds = defaultdict(float, dict.fromkeys(SOURCES, 0.0))
        self.failures = Counter(dict.fromkeys(SOURCES, 0))

    def add(self, source: str, size_bytes: int, seconds: float) -> None:
        """Count a piece that has come."""
        self.size_bytes[source] += size_bytes
        self.seconds[source] += seconds

    def declare(self, registry: Registry) -> None:
        """Declare the metrics in a registry."""
        for name, text, counts in (
            ("bytes", "Bytes of models that were fetched", self.size_bytes),
            ("seconds", "Seconds of requests for pieces of models", self.seconds),
            ("failures", "Failed requests for pieces of models", self.failures),
        ):
            registry.counter(
                f"dynamo_model_fetch_{name}_total",
                f"{text}, by source: hub, bucket, folder, index or peer.",
                ("source",),
                callback=partial(_by_source, counts),
            )


def _by_source(counts: Mapping[str, float]) -> Mapping[tuple[str, ...], float]:
    # copied at once: threads add sources meanwhile
    return {(source,): float(count) for source, count in dict(counts).items()}


FETCHED = FetchCounts()
"""The counts of this process."""
