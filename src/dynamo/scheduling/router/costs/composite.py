"""The weighted score of four shares: cached prefix, load, latency, memory."""

from __future__ import annotations

from typing import Self

import msgspec

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.worker_state import WorkerState

MAX_LATENCY_MS = 2_000.0
"""From here on a latency scores nothing, where a request names no limit."""


class CostWeights(msgspec.Struct, frozen=True):
    """What each share counts."""

    cache_hit: float = 0.4
    load: float = 0.3
    latency: float = 0.2
    memory: float = 0.1


def weights_from_settings(settings: RouterSettings) -> CostWeights:
    """Return the weights of `router.routing_strategy`."""
    weights = settings.routing_strategy
    return CostWeights(
        cache_hit=weights.cache_hit_weight,
        load=weights.load_weight,
        latency=weights.latency_weight,
        memory=weights.memory_weight,
    )


def composite_terms(
    weights: CostWeights, hit_ratio: float, load: float, latency_score: float, free_memory: float
) -> dict[str, float]:
    """The score's parts; all shares between 0 and 1, the higher the better except `load`."""
    return {
        "cache_hit": weights.cache_hit * hit_ratio,
        "load": weights.load * (1.0 - load),
        "latency": weights.latency * latency_score,
        "memory": weights.memory * free_memory,
    }


def latency_score(latency_ms: float, max_latency_ms: float = MAX_LATENCY_MS) -> float:
    """1 for none, 0 from `longest_ms` on."""
    return max(0.0, 1.0 - latency_ms / max_latency_ms) if max_latency_ms > 0 else 0.0


class CompositeCost(Cost):
    """The negative of the score, since the lowest cost wins."""

    uses_load_reports = True

    def __init__(self, weights: CostWeights | None = None) -> None:
        self._weights = weights or CostWeights()

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Self:
        """Make a cost with the weights of `router.routing_strategy`."""
        return cls(weights_from_settings(settings))

    def update_settings(self, settings: RouterSettings) -> None:
        self._weights = weights_from_settings(settings)

    def terms(self, request: PendingRequest, book: WorkerState, now: float) -> dict[str, float]:
        hit = request.overlaps.get(book.name, 0) * request.block_tokens / request.prompt.tokens
        waits_ms = book.backlog_ms(now) + book.predict_prefill_ms(
            request.uncached_tokens(book.name)
        )
        free = 1.0 - book.kv_cache_usage()
        parts = composite_terms(
            self._weights, hit, book.load_factor(), latency_score(waits_ms), free
        )
        return {name: -part for name, part in parts.items()}
