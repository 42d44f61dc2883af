"""Mode `adaptive`: the adaptive balancer over what workers report and what was sent there since."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.router.labels import excluded_workers
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.router.policies.adaptive_balancer import (
    DEFAULT_TOKENS_PER_S,
    AdaptiveLoadBalancer,
    LoadBalancingError,
    WorkerMetrics,
    count_prompt_tokens,
)
from dynamo.scheduling.router.policy import Candidate, Decision, Policy, no_workers_error
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.worker_state import (
    DEFAULT_MAX_SEQUENCES,
    PlacedRequest,
    WorkerState,
    WorkerStates,
)

ADAPTIVE = "adaptive"
DEFAULT_CAPACITY_TOKENS = 65_536.0


class BalancerWorkerRef(msgspec.Struct, frozen=True):
    """A worker to the balancer, which was told of it before."""

    id: str


class AdaptivePolicy(Policy):
    """Where none has room, the least loaded gets the request, which then waits in its queue.
    Reports are late, so the books of what went where count beside them."""

    def __init__(
        self, client: Client, loads: LoadView, clock: Clock, tie_mode: str = "random"
    ) -> None:
        """`ties`: the basic mode that decides between equals."""
        self._client = client
        self._loads = loads
        self._clock = clock
        self._tie_mode = tie_mode
        self._worker_states = WorkerStates()
        self.balancer = AdaptiveLoadBalancer(tie_breaker=self._break_tie)
        loads.add_listener(self._worker_states.on_load_report)
        self._stop_listening = client.on_change(self._on_instances_changed)
        self._on_instances_changed()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        instances = self._client.instances
        out = excluded_workers(instances, context) | tried
        books = [one for one in self._worker_states.workers if one.instance.id not in out]
        if not books:
            raise no_workers_error(self._client)
        now = self._clock.now()
        self._worker_states.refresh_next(now)
        best = self._assign(books, request)
        table = self._build_cost_table(books)
        prompt = Prompt(count_prompt_tokens(request), ())
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        active = PlacedRequest(name, best, prompt, prompt.tokens, now)
        active.first_token_callback, active.end_callback = self._on_first_token, self._on_ended
        best.place(active, now)
        return Decision(
            best.instance, ADAPTIVE, len(books), cost_table=table, placement=active, rank=best.rank
        )

    async def close(self) -> None:
        self._stop_listening()
        self._loads.close()

    def _assign(self, books: list[WorkerState], request: GenerateRequest) -> WorkerState:
        balancer = self.balancer
        for book in books:
            balancer.update_metrics(book.name, balancer_metrics(book))
        try:
            name = balancer.assign(
                [BalancerWorkerRef(book.name) for book in books], request
            ).worker_id
        except LoadBalancingError:
            return min(books, key=lambda book: balancer.worker_metrics[book.name].current_load)
        return self._worker_states[name]

    def _break_tie(self, equal: Sequence[str]) -> str:
        ids = {self._worker_states[name].instance.id: name for name in reversed(equal)}
        return ids[self._client.pick(self._tie_mode, ids).id]

    def _on_first_token(self, active: PlacedRequest) -> None:
        active.worker.on_first_token(active, self._clock.now())

    def _on_ended(self, active: PlacedRequest) -> None:
        """How long its answer was teaches."""
        active.worker.remove(active, self._clock.now())
        if active.emitted:
            self.balancer.prediction_model.observe(active.prompt_tokens, active.emitted)

    def _build_cost_table(self, books: list[WorkerState]) -> tuple[Candidate, ...]:
        rows = []
        for book in books:
            capacity = self.balancer.capacity(book.name)
            terms = {
                "base": capacity.base,
                "available": capacity.available,
                "effective": capacity.effective,
            }
            rows.append(Candidate(book.name, 0, -capacity.effective, terms))
        return tuple(sorted(rows, key=lambda row: row.cost))

    def _on_instances_changed(self) -> None:
        for gone in self._worker_states.update_instances(self._client.instances):
            self.balancer.remove_worker(gone)


def balancer_metrics(book: WorkerState) -> WorkerMetrics:
    """As the worker reports, with what was sent there since. Its load is x / (1 + x), x being the
    steps that its open prompts fill plus the share of its places that is taken: it never is full,
    but whoever comes next gets a smaller part."""
    info = book.engine_info
    places = info.max_num_seqs if info else DEFAULT_MAX_SEQUENCES
    prompts = book.pending_prefill_tokens + book.external_prefill_tokens
    requests = len(book.active) + book.external_requests
    work = prompts / book.token_budget + requests / places
    return WorkerMetrics(
        current_load=work / (1.0 + work),
        available_memory=1.0 - book.kv_cache_usage(),
        capacity_tokens=float(info.num_blocks * info.block_tokens)
        if info
        else DEFAULT_CAPACITY_TOKENS,
        speed=DEFAULT_TOKENS_PER_S / book.slowdown.factor,
    )
