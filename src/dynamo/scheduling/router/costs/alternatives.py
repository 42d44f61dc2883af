"""Costs other than predicted times: weighted shares, affinity, and the cost of Dynamo 1.x."""

from __future__ import annotations

from typing import Self

from dynamo.core.settings.schema_router import RouterSettings, RoutingStrategySettings
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

MAX_LATENCY_MS = 2_000.0
"""Latency that scores 0 when a request names no limit."""


def composite_terms(
    weights: RoutingStrategySettings,
    hit_ratio: float,
    load: float,
    latency_score: float,
    free_memory: float,
) -> dict[str, float]:
    """Return the summands of the score. All arguments are in 0 to 1; the score grows with each of
    them except `load`."""
    return {
        "cache_hit": weights.cache_hit_weight * hit_ratio,
        "load": weights.load_weight * (1.0 - load),
        "latency": weights.latency_weight * latency_score,
        "memory": weights.memory_weight * free_memory,
    }


def latency_score(latency_ms: float, max_latency_ms: float = MAX_LATENCY_MS) -> float:
    """Return 1 for no latency, falling to 0 at `max_latency_ms`."""
    return max(0.0, 1.0 - latency_ms / max_latency_ms) if max_latency_ms > 0 else 0.0


class CompositeCost(Cost):
    """The negative of the weighted score, since the lowest cost wins."""

    uses_load_reports = True

    def __init__(self, weights: RoutingStrategySettings | None = None) -> None:
        self._weights = weights or RoutingStrategySettings()

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> Self:
        """Make a cost with the weights of `router.routing_strategy`."""
        return cls(settings.routing_strategy)

    def update_settings(self, settings: RouterSettings) -> None:
        self._weights = settings.routing_strategy

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        hit = request.overlaps.get(worker.name, 0) * request.block_tokens / request.prompt.tokens
        prefill_ms = worker.predict_prefill_ms(request.uncached_tokens(worker.name))
        latency = latency_score(worker.backlog_ms(now) + prefill_ms)
        free = 1.0 - worker.kv_cache_usage()
        terms = composite_terms(self._weights, hit, worker.load_factor(), latency, free)
        return {name: -term for name, term in terms.items()}


MAX_BACKLOG_MS = 500.0
AFFINITY_BONUS_MS = 1e6
"""Discount for each cached block: more than any queue costs."""


class AffinityCost(Cost):
    """Prefer the worker with the most blocks of the prompt among those that hold at least half of
    them and have at most MAX_BACKLOG_MS of pending prefill. Without such a worker, the lowest
    pending prefill plus step time times requests wins."""

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        backlog = worker.backlog_ms(now)
        overlap = request.overlaps.get(worker.name, 0)
        is_preferred = 2 * overlap >= len(request.prompt.hashes) and backlog <= MAX_BACKLOG_MS
        affinity = -AFFINITY_BONUS_MS * overlap if overlap and is_preferred else 0.0
        return {"queue": backlog, "affinity": affinity, "load": worker.step_ms * len(worker.active)}


class BlockCost(Cost):
    """(pending + new prompt tokens) / block size + distinct active blocks of the worker with this
    request added. Only equal costs are ties. Source: ai-dynamo 1.6, kv-router."""

    tie_tolerance = 0.0

    def __init__(self) -> None:
        self._active_blocks: dict[str, dict[int, int]] = {}

    def terms(self, request: PendingRequest, worker: WorkerState, now: float) -> dict[str, float]:
        del now
        size = request.block_tokens
        new = request.prompt.tokens - request.overlaps.get(worker.name, 0) * size
        active = self._active_blocks.get(worker.name, {})
        hashes = request.prompt.hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hashes[middle] in active else (low, middle)
        blocks = -(-request.prompt.tokens // size)
        return {
            "prefill_blocks": (worker.pending_prefill_tokens + new) / size,
            "decode_blocks": float(len(active) + blocks - low),
        }

    def on_placed(self, placed: PlacedRequest) -> None:
        active = self._active_blocks.setdefault(placed.worker.name, {})
        for block in placed.hashes:
            active[block] = active.get(block, 0) + 1

    def on_ended(self, placed: PlacedRequest) -> None:
        name = placed.worker.name
        active = self._active_blocks.get(name, {})
        for block in placed.hashes:
            count = active.get(block, 0) - 1
            if count > 0:
                active[block] = count
            else:
                active.pop(block, None)
        if not active:
            self._active_blocks.pop(name, None)
