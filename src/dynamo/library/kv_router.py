"""`KvRouter`: routing by the weighted score, as a library with open steps.

Frontends route by `KvPolicy`. This class is for programs that choose a worker themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec

from dynamo.core.errors import InvalidRequest, NoWorkers
from dynamo.core.hashing import BLOCK_TOKENS, block_hashes
from dynamo.core.labels import LABELS_KEY
from dynamo.core.settings.schema_router import RoutingStrategySettings
from dynamo.core.values import Load
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.component import Component
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.alternatives import composite_terms, latency_score
from dynamo.scheduling.router.selectors import DefaultWorkerSelector, WorkerScore, WorkerSelector
from dynamo.scheduling.workers.ledger import NOT_SENT, Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.worker import DEFAULT_MAX_SEQUENCES, WorkerState

MAX_UNREPORTED_REQUESTS = 1024
"""So many requests are counted at a worker since its last load report."""

Tokenize = Callable[[str], Sequence[int]]
OnRouted = Callable[["WorkerSelectionResult", "CacheHitAnalysis"], None]


class PerformanceRequirements(msgspec.Struct, frozen=True):
    """`max_latency`: latency in seconds that scores 0."""

    max_latency: float = 2.0


class SchedulingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with `token_ids`, or with `prompt` if the router has a tokenizer. The worker must
    have the labels in `constraints`."""

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
    """A prompt's blocks. `prefix_patterns` are the lengths in tokens of the prefixes that
    `prefix_hashes` name."""

    tokens: Sequence[int]
    prefix_patterns: Sequence[int]
    prefix_hashes: Sequence[int]
    sequence_length: int


class CacheHitAnalysis(msgspec.Struct, frozen=True):
    """The cached share of a prompt by worker, and the best of them. `best_hit_worker` is "" if no
    worker holds any of it. Data-parallel ranks are listed as "instance/rank". `prompt_tokens` is
    the length of the prompt."""

    worker_hits: Mapping[str, float]
    global_hit_ratio: float
    best_hit_worker: str
    prompt_tokens: int = 0

    @property
    def hit_ratio(self) -> float:
        """The best share of all workers."""
        return self.global_hit_ratio


class WorkerStatus(msgspec.Struct, frozen=True):
    """Load and memory as shares, 0 to 1. The names are those of Dynamo's documents:
    `cpu_utilization` is the engine's load, `network_latency` the seconds until a new prompt would
    start."""

    cpu_utilization: float = 0.0
    network_latency: float = 0.0
    available_memory_ratio: float = 1.0


class WorkerSelectionResult(msgspec.Struct, frozen=True):
    """The chosen worker. `expected_latency` is the predicted time to the first token in seconds;
    `rank` is the data-parallel rank of a worker that has several."""

    worker: Instance
    cache_hit_ratio: float
    expected_latency: float
    rank: int | None = None


class KvRouter:
    """Choose workers of a component's `generate` endpoint by its KV events and load reports. Use as
    `async with KvRouter(component, block_size, selector) as router`, then call `await
    router.route_request(request)`."""

    def __init__(
        self,
        component: Component,
        block_size: int = BLOCK_TOKENS,
        selector: WorkerSelector | None = None,
        *,
        tokenizer: Tokenize | None = None,
        weights: RoutingStrategySettings | None = None,
        on_routed: OnRouted | None = None,
    ) -> None:
        runtime = component.namespace.runtime
        self._component = component
        self._block_size = block_size
        self._selector = selector or DefaultWorkerSelector(rng=runtime.rng)
        self._tokenizer = tokenizer
        self._weights = weights or RoutingStrategySettings()
        self._on_routed = on_routed
        self._clock = runtime.clock
        self._events = runtime.events
        self._view = CacheView(runtime.clock, block_tokens=block_size)
        self._loads = LoadView(runtime.clock)
        self._ledger = Ledger(runtime.clock)
        self._ledger.follow_answers()
        self._worker_states = self._ledger.workers
        self._applied_loads: dict[str, Load] = {}
        self._routed_count = 0
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
        """Return the best worker, and count the request there until the worker's next report.

        Raises `RouterError.NoAvailableWorker`, `InvalidRequest`.
        """
        prefix = self.analyze_request_prefix(request)
        hits = self.query_cache_hits(prefix)
        scores = self.calculate_worker_scores(hits, request.performance_requirements)
        name = self._selector.select_worker(scores, request.constraints)
        score, worker = scores[name], self._worker_states[name]
        result = WorkerSelectionResult(
            worker.instance, score.cache_hit_ratio, score.expected_latency, worker.rank
        )
        self._view.on_request_routed(name, prefix.prefix_hashes)
        self._count_routed(worker, prefix, score.cache_hit_ratio)
        self.update_routing_metrics(result, hits)
        return result

    def analyze_request_prefix(self, request: SchedulingRequest) -> PrefixAnalysis:
        """Return the prompt's blocks. Raises `InvalidRequest` for a text without a tokenizer."""
        tokens = request.token_ids
        if not tokens and request.prompt:
            if self._tokenizer is None:
                raise InvalidRequest(
                    "a text prompt needs a tokenizer",
                    hint="pass token_ids, or create KvRouter(..., tokenizer=...)",
                    param="prompt",
                )
            tokens = self._tokenizer(request.prompt)
        hashes = block_hashes(array("I", tokens).tobytes(), self._block_size)
        lengths = [self._block_size * (index + 1) for index in range(len(hashes))]
        return PrefixAnalysis(tokens, lengths, hashes, len(tokens))

    def query_cache_hits(self, prefix: PrefixAnalysis) -> CacheHitAnalysis:
        """Return the share of the prompt that each worker holds."""
        overlaps = self._view.find_overlaps(prefix.prefix_hashes)
        tokens = max(1, prefix.sequence_length)
        hits = {
            worker.name: overlaps.get(worker.name, 0) * self._block_size / tokens
            for worker in self._refresh_workers()
        }
        best = max(hits, key=hits.__getitem__, default="")
        ratio = hits.get(best, 0.0)
        return CacheHitAnalysis(hits, ratio, best if ratio else "", prefix.sequence_length)

    def calculate_worker_scores(
        self, hits: CacheHitAnalysis, requirements: PerformanceRequirements
    ) -> dict[str, WorkerScore]:
        """Return the weighted score of every live worker."""
        scores = {}
        for worker in self._refresh_workers():
            hit_ratio = hits.worker_hits.get(worker.name, 0.0)
            uncached_tokens = round(hits.prompt_tokens * (1.0 - hit_ratio))
            scores[worker.name] = worker_score(
                hit_ratio,
                status_from_load(worker),
                requirements,
                self._weights,
                worker.instance.capabilities.get(LABELS_KEY),
                prefill_s=worker.predict_prefill_ms(uncached_tokens) * 1e-3,
            )
        return scores

    def worker_status(self, worker: str) -> WorkerStatus:
        """Return the status from the last load report; idle without a report. `worker` is a key of
        `worker_hits`."""
        self._refresh_workers()
        state = self._worker_states.get(worker)
        return status_from_load(state) if state is not None else WorkerStatus()

    def update_routing_metrics(self, result: WorkerSelectionResult, hits: CacheHitAnalysis) -> None:
        """Call `on_routed` with a choice."""
        if self._on_routed is not None:
            self._on_routed(result, hits)

    def _count_routed(self, worker: WorkerState, prefix: PrefixAnalysis, hit_ratio: float) -> None:
        """Count a request at its worker, and drop the oldest if the worker sends no reports."""
        ledger, tokens = self._ledger, prefix.sequence_length
        if len(worker.active) >= MAX_UNREPORTED_REQUESTS:
            ledger.end(ledger.requests[next(iter(worker.active))], NOT_SENT)
        self._routed_count += 1
        key, uncached_tokens = str(self._routed_count), round(tokens * (1.0 - hit_ratio))
        placed = ledger.place(key, worker, Prompt(tokens, ()), new_tokens=uncached_tokens)
        placed.updates_model = False

    def _refresh_workers(self) -> Sequence[WorkerState]:
        """Apply instances and new load reports; return the state of each worker and rank. A report
        counts the requests that were routed before it."""
        if self._client is None:
            raise NoWorkers("the router is not open: use it as `async with KvRouter(...)`")
        instances, states, before = self._client.instances, self._worker_states, self._applied_loads
        states.update_instances(instances)
        loads = {name: load for name, load in self._loads.loads.items() if name in instances}
        reported = {name for name, load in loads.items() if before.get(name) is not load}
        for placed in tuple(self._ledger.requests.values()):
            name = placed.worker.instance.id
            if name in reported or name not in instances:
                self._ledger.end(placed, NOT_SENT)
        self._applied_loads = loads
        for name in reported:
            states.on_load_report(name, loads[name], self._clock.now())
        self._view.set_cacheless_workers(states.cacheless)
        return states.workers


def status_from_load(worker: WorkerState) -> WorkerStatus:
    """Return the status by the worker's last load report and the requests routed since."""
    load = worker.load or Load()
    slots = worker.engine_info.max_num_seqs if worker.engine_info else DEFAULT_MAX_SEQUENCES
    prefill_tokens = load.prefill_tokens + worker.pending_prefill_tokens
    wait_ms = worker.predict_prefill_ms(prefill_tokens) if prefill_tokens else 0.0
    return WorkerStatus(
        cpu_utilization=min(1.0, (load.running + load.waiting + len(worker.active)) / slots),
        network_latency=wait_ms * 1e-3,
        available_memory_ratio=1.0 - worker.kv_cache_usage(),
    )


def worker_score(
    hit_ratio: float,
    status: WorkerStatus,
    requirements: PerformanceRequirements,
    weights: RoutingStrategySettings,
    labels: Mapping[str, str] | None = None,
    *,
    prefill_s: float = 0.0,
) -> WorkerScore:
    """Return the weighted score; by default 0.4 hit ratio + 0.3 (1 - load) + 0.2 latency score +
    0.1 free memory. `prefill_s` is the time to compute the prompt once the worker starts it."""
    latency = latency_score(status.network_latency * 1e3, requirements.max_latency * 1e3)
    terms = composite_terms(
        weights, hit_ratio, status.cpu_utilization, latency, status.available_memory_ratio
    )
    return WorkerScore(
        total_score=sum(terms.values()),
        cache_hit_ratio=hit_ratio,
        expected_latency=status.network_latency + prefill_s,
        load_factor=status.cpu_utilization,
        labels=dict(labels or {}),
    )
