"""Hears of every decision and what came of it; feeds the collector, the explanations and the
metrics, so that a cold workload and a loss by routing can be told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from dynamo.core.clock import Clock
from dynamo.core.errors import WorkerDraining
from dynamo.core.values import GenerateRequest
from dynamo.scheduling.router.collector.collector import RoutingMetricsCollector
from dynamo.scheduling.router.collector.record import RoutingRecord
from dynamo.scheduling.router.explain.decision_log import DecisionEntry, DecisionLog
from dynamo.scheduling.router.policy import Decision, Observer, Outcome
from dynamo.telemetry import Registry

PREFIX_STRIDE = 4
"""Every fourth block stands for those before it: a quarter of the memory, of the time, and of the
resolution."""
PREFIXES_PER_GENERATION = 19_000
"""In a generation; a few more and CPython's set takes four times the room."""


class PrefixHistory:
    """Hashes are chained, so that a block that was seen has all blocks before it seen: the longest
    known prefix is found by halving. Three generations of `kept` names each; the oldest is
    forgotten as a whole."""

    def __init__(
        self, generation_size: int = PREFIXES_PER_GENERATION, stride: int = PREFIX_STRIDE
    ) -> None:
        self._generation_size = generation_size
        self._stride = stride
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._oldest: set[int] = set()

    def add(self, hashes: Sequence[int]) -> int:
        """Remember a prompt's blocks; how many of them, from the first on, were known before
        (rounded down to the stride)."""
        marks = hashes[self._stride - 1 :: self._stride]
        new, old, oldest = self._new, self._old, self._oldest
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            mark = marks[middle]
            if mark in new or mark in old or mark in oldest:
                low = middle + 1
            else:
                high = middle
        new.update(marks)
        if len(new) > self._generation_size:
            self._new, self._old, self._oldest = set(), new, old
        return low * self._stride


NOT_FAILURES = ("", "cancelled", WorkerDraining.code)
"""How a call ends that nothing is wrong with; a drained worker's goes on elsewhere."""
FALLBACK_BLOCK_TOKENS = 16
"""What a prompt is measured in where nobody looked at its blocks."""


class RoutingRecorder(Observer):
    """One for a process. `waiting`: how many requests are held in the router now."""

    def __init__(
        self,
        clock: Clock,
        registry: Registry,
        name: str = "",
        *,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._prefix_history = PrefixHistory()
        self._in_flight: dict[int, tuple[DecisionEntry, int, int]] = {}
        self.decision_log = DecisionLog(clock, name)
        self.collector = RoutingMetricsCollector(wall=clock.wall)
        self.active_requests: Counter[str] = Counter()
        self.routed_requests: Counter[str] = Counter()
        self._declare_metrics(registry, waiting)

    def _declare_metrics(self, registry: Registry, waiting: Callable[[], int]) -> None:
        counter = registry.counter
        self._prompt_blocks = counter("dynamo_router_prompt_blocks_total", "Prompt blocks routed")
        self._seen_blocks = counter(
            "dynamo_router_seen_blocks_total",
            "Prompt blocks that were asked for before: what unlimited memory would hit",
        )
        self._reachable_blocks = counter(
            "dynamo_router_reachable_blocks_total", "Prompt blocks that the best holder held"
        )
        self._hit_blocks = counter(
            "dynamo_router_hit_blocks_total", "Prompt blocks that the chosen worker held"
        )
        self._cached_tokens = counter(
            "dynamo_router_cached_tokens_total", "Prompt tokens that engines took from their caches"
        )
        self._prompt_tokens = counter(
            "dynamo_router_prompt_tokens_total", "Prompt tokens of answers"
        )
        registry.gauge(
            "dynamo_router_waiting_requests",
            "Requests held in the router for a worker",
            callback=waiting,
        )
        registry.gauge(
            "dynamo_router_alert_ratio",
            "How far a rule of good routing is broken: above 1, or 0 while it holds",
            ("alert",),
            callback=self.collector.alert_ratios,
            merge="max",
        )

    def retain_workers(self, workers: Collection[str]) -> None:
        """Only these are there (any more)."""
        for name in [name for name in self.routed_requests if name not in workers]:
            del self.routed_requests[name]

    def on_decision(self, request: GenerateRequest, decision: Decision) -> None:
        worker = decision.instance.id
        load = self.active_requests[worker]
        self.active_requests[worker] = load + 1
        self.routed_requests[worker] += 1
        hashes = getattr(decision.placement, "hashes", ())
        seen = self._prefix_history.add(hashes) if hashes else 0
        self._in_flight[id(decision)] = (self.decision_log.add(request, decision), load, seen)
        if decision.prompt_blocks:
            best = decision.best_overlap_blocks
            self._prompt_blocks.value += decision.prompt_blocks
            self._seen_blocks.value += max(best, seen)
            self._reachable_blocks.value += best
            self._hit_blocks.value += decision.overlap_blocks

    def on_outcome(self, request: GenerateRequest, decision: Decision, outcome: Outcome) -> None:
        worker = decision.instance.id
        entry, load, seen = self._in_flight.pop(id(decision))
        entry.set_outcome(outcome)
        left = self.active_requests.pop(worker) - 1
        if left:
            self.active_requests[worker] = left
        if outcome.ttft_s is not None:
            self._cached_tokens.value += outcome.cached_tokens
            self._prompt_tokens.value += outcome.prompt_tokens
        blocks = decision.prompt_blocks
        cached = outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0
        self.collector.record(
            RoutingRecord(
                self._clock.wall(),
                request.request_id,
                worker,
                cache_hit_ratio=decision.overlap_blocks / blocks if blocks else cached,
                decision_latency=decision.waited_s,
                worker_load=load,
                queue_length=decision.queue_length,
                prompt_blocks=blocks or outcome.prompt_tokens // FALLBACK_BLOCK_TOKENS,
                reachable_ratio=decision.best_overlap_blocks / blocks if blocks else None,
                seen_ratio=seen / blocks if blocks else None,
                achieved_ratio=cached,
                view=decision.view,
                ttft_s=outcome.ttft_s,
                predicted_ttft_s=decision.predicted_ttft_s,
                output_tokens=outcome.output_tokens,
                failed=outcome.error not in NOT_FAILURES,
            )
        )
