"""The observer of all routing decisions: feeds the decision log, the collector and the metrics.

The metrics distinguish a cold workload from cache hits that routing lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from dynamo.core.clock import Clock
from dynamo.core.errors import WorkerDraining
from dynamo.core.values import GenerateRequest
from dynamo.scheduling.router.collector.collector import DecisionCollector
from dynamo.scheduling.router.collector.report import RoutingRecord
from dynamo.scheduling.router.explain.decision_log import DecisionEntry, DecisionLog
from dynamo.scheduling.router.policy import Decision, Observer, Outcome
from dynamo.telemetry import Registry

PREFIX_STRIDE = 4
"""Stride of the recorded blocks; 4 needs a quarter of the memory and time, at a quarter of the
resolution."""
PREFIXES_PER_GENERATION = 19_000
"""Hashes in one generation. A few more would make CPython's set four times as large."""


class PrefixHistory:
    """The prompt prefixes seen before, in three generations; the oldest is dropped as a whole.
    Hashes are chained: a seen block implies that all blocks before it were seen. The longest seen
    prefix is therefore found by binary search."""

    def __init__(
        self, generation_size: int = PREFIXES_PER_GENERATION, stride: int = PREFIX_STRIDE
    ) -> None:
        self._generation_size = generation_size
        self._stride = stride
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._oldest: set[int] = set()

    def add(self, hashes: Sequence[int]) -> int:
        """Add a prompt's blocks. Return how many leading blocks were seen before, rounded down to
        the stride."""
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
"""Error codes that do not count as failures. A draining worker's request continues elsewhere."""
FALLBACK_BLOCK_TOKENS = 16
"""Block size for prompts whose blocks the policy did not look at."""


class RoutingRecorder(Observer):
    """Record the decisions of one model, in the log and report of the recorder of the `process` if
    there is one. `waiting` returns the number of requests held in the router. An open decision is
    found by (request id, choice): the attempts of one choice follow each other."""

    def __init__(
        self,
        clock: Clock,
        registry: Registry | None,
        name: str = "",
        *,
        waiting: Callable[[], int] = lambda: 0,
        process: RoutingRecorder | None = None,
    ) -> None:
        self._clock = clock
        self._prefix_history = PrefixHistory()
        self._in_flight: dict[tuple[str, int], tuple[DecisionEntry, int]] = {}
        self.decision_log: DecisionLog = (
            process.decision_log if process else DecisionLog(clock, name)
        )
        self.collector: DecisionCollector = (
            process.collector if process else DecisionCollector(wall=clock.wall)
        )
        self.routed_requests: Counter[str] = process.routed_requests if process else Counter()
        self._declare_metrics(registry or Registry(), waiting)

    def _declare_metrics(self, registry: Registry, waiting: Callable[[], int]) -> None:
        counter = registry.counter
        self._prompt_blocks = counter("dynamo_router_prompt_blocks_total", "Prompt blocks routed")
        self._seen_blocks = counter(
            "dynamo_router_seen_blocks_total",
            "Prompt blocks seen before: the hits with unlimited memory",
        )
        self._reachable_blocks = counter(
            "dynamo_router_reachable_blocks_total",
            "Prompt blocks held by the worker with the longest overlap",
        )
        self._hit_blocks = counter(
            "dynamo_router_hit_blocks_total", "Prompt blocks held by the chosen worker"
        )
        self._cached_tokens = counter(
            "dynamo_router_cached_tokens_total", "Prompt tokens that engines took from their caches"
        )
        self._prompt_tokens = counter(
            "dynamo_router_prompt_tokens_total", "Prompt tokens of answered requests"
        )
        registry.gauge(
            "dynamo_router_waiting_requests",
            "Requests held in the router for a worker",
            callback=waiting,
        )

    def retain_workers(self, workers: Collection[str]) -> None:
        """Drop the counters of all other workers."""
        for name in [name for name in self.routed_requests if name not in workers]:
            del self.routed_requests[name]

    def on_decision(self, request: GenerateRequest, decision: Decision) -> None:
        self.routed_requests[decision.instance.id] += 1
        prompt = decision.prompt
        seen = self._prefix_history.add(prompt.hashes) if prompt and prompt.hashes else 0
        entry = self.decision_log.add(request, decision)
        self._in_flight[request.request_id, request.choice] = (entry, seen)
        if decision.prompt_blocks:
            best = decision.best_overlap_blocks
            self._prompt_blocks.value += decision.prompt_blocks
            self._seen_blocks.value += max(best, seen)
            self._reachable_blocks.value += best
            self._hit_blocks.value += decision.overlap_blocks

    def on_outcome(self, request: GenerateRequest, decision: Decision, outcome: Outcome) -> None:
        in_flight = self._in_flight.pop((request.request_id, request.choice), None)
        if in_flight is None:
            return  # another request with the same id ended first
        entry, seen = in_flight
        entry.set_outcome(outcome)
        if outcome.ttft_s is not None:
            self._cached_tokens.value += outcome.cached_tokens
            self._prompt_tokens.value += outcome.prompt_tokens
        blocks = decision.prompt_blocks
        cached = outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0
        self.collector.record(
            RoutingRecord(
                self._clock.wall(),
                request.request_id,
                decision.instance.id,
                cache_hit_ratio=decision.overlap_blocks / blocks if blocks else cached,
                decision_latency=decision.waited_s,
                worker_load=outcome.load,
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
