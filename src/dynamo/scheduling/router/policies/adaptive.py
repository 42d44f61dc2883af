"""Mode adaptive: the adaptive balancer over load reports and the requests placed since."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.router.features import excluded_workers
from dynamo.scheduling.router.policies.adaptive_balancer import (
    DEFAULT_TOKENS_PER_S,
    CapacityBalancer,
    LoadBalancingError,
    WorkerMetrics,
)
from dynamo.scheduling.router.policy import Decision, Policy, no_workers_error
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import DEFAULT_MAX_SEQUENCES, WorkerState
from dynamo.telemetry.story import Candidate

ADAPTIVE = "adaptive"
DEFAULT_CAPACITY_TOKENS = 65_536.0


class AdaptivePolicy(Policy):
    """Choose the worker with the most capacity left. If no worker has enough, the least loaded one
    gets the request and queues it. Load reports arrive late, so requests that were placed since
    count as well."""

    def __init__(
        self, client: Client, ledger: Ledger, clock: Clock, tie_mode: str = "random"
    ) -> None:
        """`tie_mode` is the load-balancing mode that decides between equal workers."""
        self._client = client
        self._clock = clock
        self._tie_mode = tie_mode
        self._states = ledger.workers
        self.balancer = CapacityBalancer(tie_breaker=self._break_tie)
        ledger.follow_answers()
        ledger.on_ended.append(self._on_ended)
        self._stop_listening = client.on_change(self._on_instances_changed)
        self._on_instances_changed()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        excluded = excluded_workers(self._client.instances, context) | tried
        workers = [
            worker
            for worker in self._states.workers
            if worker.decodes and worker.names.isdisjoint(excluded)
        ]
        if not workers:
            raise no_workers_error(self._client)
        self._states.refresh_next(self._clock.now())
        worker = self._choose_worker(workers, request)
        table = self._build_cost_table(workers)
        return Decision(
            worker.instance, ADAPTIVE, len(workers), cost_table=lambda: table, rank=worker.rank
        )

    async def close(self) -> None:
        self._stop_listening()

    def on_load_report(self, worker: str, load: Load, now: float) -> None:
        self._states.on_load_report(worker, load, now)

    def _choose_worker(self, workers: list[WorkerState], request: GenerateRequest) -> WorkerState:
        balancer = self.balancer
        for worker in workers:
            balancer.update_metrics(worker.name, balancer_metrics(worker))
        try:
            name, _, _ = balancer.choose([worker.name for worker in workers], request)
        except LoadBalancingError:
            metrics = balancer.worker_metrics
            return min(workers, key=lambda worker: metrics[worker.name].current_load)
        return self._states[name]

    def _break_tie(self, equal: Sequence[str]) -> str:
        ids = {self._states[name].instance.id: name for name in reversed(equal)}
        return ids[self._client.pick(self._tie_mode, ids).id]

    def _on_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        """Learn the length of an answer."""
        del error
        if placed.emitted:
            self.balancer.prediction_model.observe(placed.prompt_tokens, placed.emitted)

    def _build_cost_table(self, workers: list[WorkerState]) -> tuple[Candidate, ...]:
        rows = []
        for worker in workers:
            capacity = self.balancer.capacity(worker.name)
            terms = {
                "base": capacity.base,
                "available": capacity.available,
                "effective": capacity.effective,
            }
            rows.append(Candidate(worker.name, 0, -capacity.effective, terms))
        return tuple(sorted(rows, key=lambda row: row.cost))

    def _on_instances_changed(self) -> None:
        for name in [name for name in self.balancer.worker_metrics if name not in self._states]:
            self.balancer.remove_worker(name)


def balancer_metrics(worker: WorkerState) -> WorkerMetrics:
    """Return the metrics of the last report plus the requests placed since. The load is x / (1 +
    x), where x is the number of steps that pending prompts fill plus the occupied share of sequence
    slots. A worker is therefore never full; each further request gets a smaller part of it."""
    info = worker.engine_info
    slots = info.max_num_seqs if info else DEFAULT_MAX_SEQUENCES
    prompt_tokens = worker.pending_prefill_tokens + worker.external_prefill_tokens
    requests = len(worker.active) + len(worker.arriving) + worker.slots.foreign_requests
    work = prompt_tokens / worker.token_budget + requests / slots
    return WorkerMetrics(
        current_load=work / (1.0 + work),
        available_memory=1.0 - worker.kv_cache_usage(),
        capacity_tokens=float(info.num_blocks * info.block_tokens)
        if info
        else DEFAULT_CAPACITY_TOKENS,
        speed=DEFAULT_TOKENS_PER_S / worker.slowdown.factor,
    )
