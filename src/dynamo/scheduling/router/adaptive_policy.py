"""Mode `adaptive`: the adaptive balancer over what workers report."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.values import GenerateRequest, Load
from dynamo.runtime.client import Client
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.adaptive import (
    AdaptiveLoadBalancer,
    LoadBalancingError,
    WorkerMetrics,
)
from dynamo.scheduling.router.loads import LoadView
from dynamo.scheduling.router.policy import Candidate, Decision, Policy, Ticket

ADAPTIVE = "adaptive"
UNKNOWN_SEATS = 256
UNKNOWN_BLOCKS = 4096
BLOCK_TOKENS = 16


class AdaptivePolicy(Policy):
    """Where none has room, the least loaded gets the request, which then waits in its queue."""

    def __init__(self, client: Client, loads: LoadView, clock: Clock) -> None:
        self._client = client
        self._loads = loads
        self._clock = clock
        self.balancer = AdaptiveLoadBalancer()
        self._stop_listening = client.on_change(self._announced)
        self._known: frozenset[str] = frozenset(client.instances)

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        del context
        live = [one for one in self._client.instances.values() if one.id not in tried]
        if not live:
            raise NoWorkers("no instance serves this endpoint now", retry_after_s=1.0)
        balancer = self.balancer
        for one in live:
            balancer.update_metrics(one.id, self._metrics(one))
        try:
            best = balancer.assign(live, request).worker_id
        except LoadBalancingError:
            best = min(live, key=lambda one: balancer.worker_metrics[one.id].current_load).id
        instance = self._client.instances[best]
        return Decision(
            instance,
            ADAPTIVE,
            len(live),
            table=self._table(live),
            ticket=_Ticket(self, instance, request),
        )

    async def close(self) -> None:
        self._stop_listening()
        self._loads.close()

    def ended(self, ticket: _Ticket) -> None:
        """What it took teaches."""
        seconds = self._clock.now() - ticket.started_s
        if ticket.emitted:
            self.balancer.completed(ticket.worker, ticket.prompt_tokens, ticket.emitted, seconds)

    def now(self) -> float:
        """Seconds."""
        return self._clock.now()

    def _metrics(self, instance: Instance) -> WorkerMetrics:
        """The worker's last report, with what was sent there since."""
        load = self._loads.loads.get(instance.id) or Load()
        about = instance.capabilities.get("engine")
        engine = about if isinstance(about, dict) else {}
        seats = engine.get("max_num_seqs") or UNKNOWN_SEATS
        blocks = load.total_blocks or engine.get("num_blocks") or UNKNOWN_BLOCKS
        busy = max(load.running + load.waiting, self._client.in_flight(instance.id))
        return WorkerMetrics(
            current_load=min(1.0, busy / seats),
            available_memory=1.0 - load.active_blocks / blocks,
            capacity_tokens=blocks * float(engine.get("block_tokens") or BLOCK_TOKENS),
        )

    def _table(self, live: list[Instance]) -> tuple[Candidate, ...]:
        rows = []
        for one in live:
            capacity = self.balancer.capacity(one.id)
            terms = {
                "base": capacity.base,
                "available": capacity.available,
                "effective": capacity.effective,
            }
            rows.append(Candidate(one.id, 0, -capacity.effective, terms))
        return tuple(sorted(rows, key=lambda row: row.cost))

    def _announced(self) -> None:
        now = frozenset(self._client.instances)
        for gone in self._known - now:
            self.balancer.forget(gone)
        self._known = now


class _Ticket(Ticket):
    __slots__ = ("_policy", "prompt_tokens", "started_s", "worker")

    def __init__(
        self, policy: AdaptivePolicy, instance: Instance, request: GenerateRequest
    ) -> None:
        super().__init__()
        self._policy = policy
        self.worker = instance.id
        self.prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        self.started_s = policy.now()

    def end(self) -> None:
        self._policy.ended(self)
