"""The weighted score of four shares: cached prefix, load, latency and free memory."""

from __future__ import annotations

from typing import Self

import msgspec

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState

MAX_LATENCY_MS = 2_000.0
"""Latency that scores 0 when a request names no limit."""


class CostWeights(msgspec.Struct, frozen=True):
    """The weight of each share."""

    cache_hit: float = 0.4
    load: float = 0.3
    latency: float = 0.2
    memory: float = 0.1

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> CostWeights:
        """Return the weights of `router.routing_strategy`."""
        weights = settings.routing_strategy
        return cls(
            weights.cache_hit_weight,
            weights.load_weight,
            weights.latency_weight,
            weights.memory_weight,
        )


def composite_terms(
    weights: CostWeights, hit_ratio: float, load: float, latency_score: float, free_memory: float
) -> dict[str, float]:
    """Return the summands of the score. All arguments are in 0 to 1; the score grows with each of
    them except `load`."""
    return {
        "cache_hit": weights.cache_hit * hit_ratio,
        "load": weights.load * (1.0 - load),
        "latency": weights.latency * latency_score,
        "memory": weights.memory * free_memory,
    }


def latency_score(latency_ms: float, max_latency_ms: float = MAX_LATENCY_MS) -> float:
    """Return 1 for no latency, falling to 0 at `max_latency_ms`."""
    return max(0.0, 1.0 - latency_ms / max_latency_ms) if max_latency_ms > 0 else 0.0


class CompositeCost(Cost):
    """The negative of the weighted score, since the lowest cost wins."""

    uses_load_reports = True

    def __init__(self, weights: CostWeights | None = None) -> None:
        self._weights = weights or CostWeights()

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Self:
        """Make a cost with the weights of `router.routing_strategy`."""
        return cls(CostWeights.from_settings(settings))

    def update_settings(self, settings: RouterSettings) -> None:
        self._weights = CostWeights.from_settings(settings)

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        hit = request.overlaps.get(worker.name, 0) * request.block_tokens / request.prompt.tokens
        prefill_ms = worker.predict_prefill_ms(request.uncached_tokens(worker.name))
        latency = latency_score(worker.backlog_ms(now) + prefill_ms)
        free = 1.0 - worker.kv_cache_usage()
        terms = composite_terms(self._weights, hit, worker.load_factor(), latency, free)
        return {name: -term for name, term in terms.items()}
