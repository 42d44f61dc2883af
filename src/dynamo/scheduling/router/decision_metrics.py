"""The metrics of routing decisions: they tell cold prompts from cache hits that routing lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.scheduling.router.attempt import Attempt, Observer
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


class DecisionMetrics(Observer):
    """Count the prompt blocks of one model's decisions. `waiting` returns the number of requests
    held in the router."""

    def __init__(self, registry: Registry, *, waiting: Callable[[], int] = lambda: 0) -> None:
        self._prefix_history = PrefixHistory()
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

    def on_attempt_started(self, attempt: Attempt) -> None:
        decision = attempt.decision
        if decision is None or not decision.prompt_blocks:
            return
        if decision.prompt is not None:
            attempt.seen_blocks = self._prefix_history.add(decision.prompt.hashes)
        best = decision.best_overlap_blocks
        self._prompt_blocks.value += decision.prompt_blocks
        self._seen_blocks.value += max(best, attempt.seen_blocks or 0)
        self._reachable_blocks.value += best
        self._hit_blocks.value += decision.overlap_blocks

    def on_attempt_ended(self, attempt: Attempt) -> None:
        if attempt.placed.first_token_s is not None:
            self._cached_tokens.value += attempt.cached_tokens
            self._prompt_tokens.value += attempt.placed.prompt_tokens
