"""`BatchOptimizer`: batches of similar requests, as a library.

Engines here batch continuously, and need no such batches. `router.queue_order: clusters` lets
similar requests leave the router's queue together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.timing.model import Timing
from dynamo.core.values import read_field
from dynamo.scheduling.router.clustering import (
    EPS,
    MIN_SAMPLES,
    NOISE,
    density_clusters,
    standardize,
)

DEFAULT_MAX_TOKENS = 1024


class RequestFeatures(msgspec.Struct, frozen=True):
    """The properties by which requests are similar. `estimated_compute_time` is in milliseconds,
    `memory_requirement` in bytes."""

    sequence_length: int
    max_new_tokens: int
    temperature: float
    model_name: str
    priority: int
    estimated_compute_time: float
    memory_requirement: float


class RequestBatch(msgspec.Struct, frozen=True):
    """Requests of one model to compute together, with their cluster; `NOISE`: a request alone."""

    label: int
    model_name: str
    requests: tuple[Any, ...]
    features: tuple[RequestFeatures, ...]

    @property
    def padding(self) -> int:
        """The prompt tokens by which shorter prompts miss the longest."""
        lengths = [each.sequence_length for each in self.features]
        return max(lengths) * len(lengths) - sum(lengths)


class OptimizedBatches(msgspec.Struct, frozen=True):
    """Batches, those with the highest priority first. `performance_metrics` has the number of
    batches, the share of padded prompt tokens, and that of one batch of all requests."""

    batches: tuple[RequestBatch, ...]
    performance_metrics: Mapping[str, float]
    optimization_strategy: str


class BatchOptimizerConfig(msgspec.Struct, frozen=True):
    """The size of a batch, and what a token costs."""

    max_batch_size: int = 128
    kv_bytes_per_token: int = 131_072
    timing: Timing = Timing(c0=10.0, c1=0.05, c2=0.05, c3=5e-5)


class BatchOptimizer:
    """Groups pending requests by DBSCAN over their standardised features."""

    def __init__(self, config: Any = None) -> None:
        """`config` has the fields of `BatchOptimizerConfig`; missing ones have its defaults."""
        self.config = config
        defaults = BatchOptimizerConfig()
        self._max_batch_size = read_field(config, "max_batch_size", default=128)
        self._token_bytes = read_field(
            config, "kv_bytes_per_token", default=defaults.kv_bytes_per_token
        )
        self._timing = read_field(config, "timing", default=defaults.timing)

    async def optimize_batch_composition(self, pending_requests: Sequence[Any]) -> OptimizedBatches:
        """Return batches of similar requests of one model. A request is an object or a mapping with
        `input_ids`, `max_new_tokens`, `temperature`, `model` and `priority`."""
        features = [self._extract_request_features(request) for request in pending_requests]
        members: dict[tuple[int, str], list[int]] = defaultdict(list)
        alone: list[RequestBatch] = []
        for number, label in enumerate(cluster_requests(features)):
            if label == NOISE:
                alone.append(self._batch(label, [number], pending_requests, features))
            else:
                members[label, features[number].model_name].append(number)
        size = self._max_batch_size
        batches = alone + [
            self._batch(label, numbers[first : first + size], pending_requests, features)
            for (label, _), numbers in members.items()
            for first in range(0, len(numbers), size)
        ]
        batches.sort(key=lambda batch: -max(each.priority for each in batch.features))
        strategy = f"dbscan(eps={EPS}, min_samples={MIN_SAMPLES})"
        return OptimizedBatches(tuple(batches), _measure(batches, features), strategy)

    def _extract_request_features(self, request: Any) -> RequestFeatures:
        length = len(read_field(request, "input_ids", "token_ids", default=()))
        tokens = int(
            read_field(request, "max_new_tokens", "max_tokens", default=DEFAULT_MAX_TOKENS)
        )
        timing = self._timing
        context = length + tokens / 2
        return RequestFeatures(
            length,
            tokens,
            float(read_field(request, "temperature", default=0.7)),
            str(read_field(request, "model", default="")),
            int(read_field(request, "priority", default=0)),
            timing.c1 * length + tokens * (timing.c2 + timing.c3 * context),
            float((length + tokens) * self._token_bytes),
        )

    def _batch(
        self,
        label: int,
        numbers: Sequence[int],
        requests: Sequence[Any],
        features: Sequence[RequestFeatures],
    ) -> RequestBatch:
        return RequestBatch(
            label,
            features[numbers[0]].model_name,
            tuple(requests[number] for number in numbers),
            tuple(features[number] for number in numbers),
        )


def cluster_requests(features: Sequence[RequestFeatures]) -> list[int]:
    """Return the label of each request; `NOISE` for one that is like no other."""
    points = [
        (
            float(each.sequence_length),
            float(each.max_new_tokens),
            each.temperature,
            each.estimated_compute_time,
            each.memory_requirement,
        )
        for each in features
    ]
    return density_clusters(standardize(points))


def _measure(
    batches: Sequence[RequestBatch], features: Sequence[RequestFeatures]
) -> Mapping[str, float]:
    computed = sum(each.sequence_length for each in features)
    padded = sum(batch.padding for batch in batches)
    longest = max((each.sequence_length for each in features), default=0)
    at_once = longest * len(features)
    return {
        "requests": len(features),
        "batches": len(batches),
        "padding_share": padded / max(1, padded + computed),
        "padding_share_of_one_batch": 1 - computed / max(1, at_once),
    }
