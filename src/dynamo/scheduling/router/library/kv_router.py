"""`KvRouter`: routing by the weighted score as a library, step by step and open to look into.

A frontend's own routing is `KvPolicy`; this is for programs that want to ask "which worker, and
why" themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec

from dynamo.core.errors import InvalidRequest, NoWorkers
from dynamo.core.hashing import BLOCK_TOKENS, block_hashes
from dynamo.core.labels import LABELS_KEY
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.component import Component
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.composite import CostWeights, composite_terms, latency_score
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.router.selectors import (
    DefaultWorkerSelector,
    WorkerScore,
    WorkerSelector,
)
from dynamo.scheduling.router.worker_state import DEFAULT_MAX_SEQUENCES, WorkerState, WorkerStates

Tokenize = Callable[[str], Sequence[int]]
OnRouted = Callable[["WorkerSelectionResult", "CacheHitAnalysis"], None]


class PerformanceRequirements(msgspec.Struct, frozen=True):
    """`max_latency`: seconds at which a latency scores nothing."""

    max_latency: float = 2.0


class SchedulingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `token_ids`, or `prompt` where the router was given a tokenizer. `constraints`: labels
    that the worker must bear."""

    model: str = ""
    prompt: str = ""
    token_ids: Sequence[int] = ()
    max_tokens: int = 1024
    temperature: float = 0.7
    stream: bool = False
    request_id: str = ""
    constraints: Mapping[str, str] = {}
    performance_requirements: PerformanceRequirements = PerformanceRequirements()


class PrefixAnalysis(msgspec.Struct, frozen=True):
    """`prefix_patterns`: the lengths, in tokens, of the prefixes that `prefix_hashes` name."""

    tokens: Sequence[int]
    prefix_patterns: Sequence[int]
    prefix_hashes: Sequence[int]
    sequence_length: int


class CacheHitAnalysis(msgspec.Struct, frozen=True):
    """Share of the prompt, by worker; of all the best; whose that is ("" = nobody holds any). A
    worker with data-parallel ranks stands there by rank, "instance/rank"."""

    worker_hits: Mapping[str, float]
    global_hit_ratio: float
    best_hit_worker: str

    @property
    def hit_ratio(self) -> float:
        """The best that can be had."""
        return self.global_hit_ratio


class WorkerStatus(msgspec.Struct, frozen=True):
    """Shares between 0 and 1; `cpu_utilization`: the engine's load under the seeds' name;
    `network_latency`: seconds until a prompt would begin to be computed."""

    cpu_utilization: float = 0.0
    network_latency: float = 0.0
    available_memory_ratio: float = 1.0


class WorkerSelectionResult(msgspec.Struct, frozen=True):
    """`expected_latency`: seconds to the first token, as far as can be told; `rank`: the
    data-parallel rank that was chosen, of a worker that has several."""

    worker: Instance
    cache_hit_ratio: float
    expected_latency: float
    rank: int | None = None


class KvRouter:
    """`async with KvRouter(component, block_size, selector) as router: await
    router.route_request(request)`. Follows the component's `generate` endpoint and its events."""

    def __init__(
        self,
        component: Component,
        block_size: int = BLOCK_TOKENS,
        selector: WorkerSelector | None = None,
        *,
        tokenizer: Tokenize | None = None,
        weights: CostWeights | None = None,
        on_routed: OnRouted | None = None,
    ) -> None:
        runtime = component.namespace.runtime
        self._component = component
        self._block_size = block_size
        self._selector = selector or DefaultWorkerSelector(rng=runtime.rng)
        self._tokenizer = tokenizer
        self._weights = weights or CostWeights()
        self._on_routed = on_routed
        self._clock = runtime.clock
        self._events = runtime.events
        self._view = CacheView(runtime.clock, block_tokens=block_size)
        self._loads = LoadView(runtime.clock)
        self._worker_states = WorkerStates()
        self._client: Client | None = None

    async def __aenter__(self) -> Self:
        subject = f"{self._component.namespace.name}.{self._component.name}"
        await self._view.subscribe(self._events, subject + ".kv_events")
        await self._loads.subscribe(self._events, subject)
        self._client = await self._component.endpoint("generate").client()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._view.close()
        self._loads.close()
        if self._client is not None:
            await self._client.close()

    async def route_request(self, request: SchedulingRequest) -> WorkerSelectionResult:
        """The best worker now. Raises `RouterError.NoAvailableWorker`, `InvalidRequest`."""
        prefix = self.analyze_request_prefix(request)
        hits = self.query_cache_hits(prefix)
        scores = self.calculate_worker_scores(hits, request.performance_requirements)
        chosen = self._selector.select_worker(scores, request.constraints)
        score, book = scores[chosen], self._worker_states[chosen]
        result = WorkerSelectionResult(
            book.instance, score.cache_hit_ratio, score.expected_latency, book.rank
        )
        self._view.on_request_routed(chosen, prefix.prefix_hashes)
        self.update_routing_metrics(result, hits)
        return result

    def analyze_request_prefix(self, request: SchedulingRequest) -> PrefixAnalysis:
        """The prompt's blocks. Raises `InvalidRequest` for a text without a tokenizer."""
        tokens = request.token_ids
        if not tokens and request.prompt:
            if self._tokenizer is None:
                raise InvalidRequest(
                    "a prompt in words needs a tokenizer",
                    hint="give token_ids, or KvRouter(..., tokenizer=...)",
                    param="prompt",
                )
            tokens = self._tokenizer(request.prompt)
        hashes = block_hashes(array("I", tokens).tobytes(), self._block_size)
        lengths = [self._block_size * (index + 1) for index in range(len(hashes))]
        return PrefixAnalysis(tokens, lengths, hashes, len(tokens))

    def query_cache_hits(self, prefix: PrefixAnalysis) -> CacheHitAnalysis:
        """Who holds how much of it."""
        overlaps = self._view.find_overlaps(prefix.prefix_hashes)
        tokens = max(1, prefix.sequence_length)
        hits = {
            book.name: overlaps.get(book.name, 0) * self._block_size / tokens
            for book in self._refresh_workers()
        }
        best = max(hits, key=hits.__getitem__, default="")
        ratio = hits.get(best, 0.0)
        return CacheHitAnalysis(hits, ratio, best if ratio else "")

    def calculate_worker_scores(
        self, hits: CacheHitAnalysis, requirements: PerformanceRequirements
    ) -> dict[str, WorkerScore]:
        """The weighted score of every worker that is there."""
        return {
            book.name: worker_score(
                hits.worker_hits.get(book.name, 0.0),
                status_from_load(book),
                requirements,
                self._weights,
                worker_labels(book.instance),
            )
            for book in self._refresh_workers()
        }

    def worker_status(self, worker: str) -> WorkerStatus:
        """As its last load report says, by the name that `worker_hits` has; idle without one."""
        self._refresh_workers()
        book = self._worker_states.get(worker)
        return status_from_load(book) if book is not None else WorkerStatus()

    def update_routing_metrics(self, result: WorkerSelectionResult, hits: CacheHitAnalysis) -> None:
        """Tell whoever asked to hear of every choice."""
        if self._on_routed is not None:
            self._on_routed(result, hits)

    def _refresh_workers(self) -> Sequence[WorkerState]:
        """Of all workers there are now, and of each rank of theirs, with their last reports."""
        if self._client is None:
            raise NoWorkers("the router is not open: use it as `async with KvRouter(...)`")
        self._worker_states.update_instances(self._client.instances)
        now = self._clock.now()
        for worker, load in self._loads.loads.items():
            self._worker_states.on_load_report(worker, load, now)
        self._view.set_cacheless_workers(self._worker_states.cacheless)
        return self._worker_states.workers


def worker_labels(instance: Instance) -> dict[str, str]:
    """The labels that it bears."""
    return dict(instance.capabilities.get(LABELS_KEY) or {})


def status_from_load(book: WorkerState) -> WorkerStatus:
    """What the load report in its book means for the score."""
    load = book.load
    if load is None:
        return WorkerStatus()
    places = book.engine_info.max_num_seqs if book.engine_info else DEFAULT_MAX_SEQUENCES
    blocks = load.active_blocks / load.total_blocks if load.total_blocks else 0.0
    waits_ms = book.predict_prefill_ms(load.prefill_tokens) if load.prefill_tokens else 0.0
    return WorkerStatus(
        cpu_utilization=min(1.0, (load.running + load.waiting) / places),
        network_latency=waits_ms * 1e-3,
        available_memory_ratio=1.0 - min(1.0, blocks),
    )


def worker_score(
    hit_ratio: float,
    status: WorkerStatus,
    requirements: PerformanceRequirements,
    weights: CostWeights,
    labels: Mapping[str, str] | None = None,
) -> WorkerScore:
    """0.4 hit ratio + 0.3 (1 - load) + 0.2 latency score + 0.1 free memory, by default."""
    latency = latency_score(status.network_latency * 1e3, requirements.max_latency * 1e3)
    terms = composite_terms(
        weights, hit_ratio, status.cpu_utilization, latency, status.available_memory_ratio
    )
    return WorkerScore(
        total_score=sum(terms.values()),
        cache_hit_ratio=hit_ratio,
        expected_latency=status.network_latency,
        load_factor=status.cpu_utilization,
        labels=dict(labels or {}),
    )
