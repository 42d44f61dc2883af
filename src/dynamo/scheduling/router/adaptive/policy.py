"""Mode `adaptive`: the adaptive balancer over what workers report and what was sent there since."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.values import GenerateRequest
from dynamo.runtime.client import Client
from dynamo.scheduling.router.adaptive.balancer import (
    UNKNOWN_SPEED,
    AdaptiveLoadBalancer,
    LoadBalancingError,
    WorkerMetrics,
    prompt_tokens,
)
from dynamo.scheduling.router.labels import barred
from dynamo.scheduling.router.loads import LoadView
from dynamo.scheduling.router.placing.fleet import SEQUENCES, Active, Book, Fleet
from dynamo.scheduling.router.policy import Candidate, Decision, Policy, nobody
from dynamo.scheduling.router.prompt import Prompt

ADAPTIVE = "adaptive"
UNKNOWN_CAPACITY = 65_536.0


class Named(msgspec.Struct, frozen=True):
    """A worker to the balancer, which was told of it before."""

    id: str


class AdaptivePolicy(Policy):
    """Where none has room, the least loaded gets the request, which then waits in its queue.
    Reports are late, so the books of what went where count beside them."""

    def __init__(self, client: Client, loads: LoadView, clock: Clock, ties: str = "random") -> None:
        """`ties`: the basic mode that decides between equals."""
        self._client = client
        self._loads = loads
        self._clock = clock
        self._ties = ties
        self._fleet = Fleet()
        self.balancer = AdaptiveLoadBalancer(pick=self._pick)
        loads.on_report(self._fleet.reported)
        self._stop_listening = client.on_change(self._announced)
        self._announced()

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        instances = self._client.instances
        out = barred(instances, context) | tried
        books = [one for one in self._fleet.books if one.instance.id not in out]
        if not books:
            raise nobody(self._client)
        now = self._clock.now()
        self._fleet.freshen(now)
        best = self._assign(books, request)
        table = self._table(books)
        prompt = Prompt(prompt_tokens(request), ())
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        active = Active(name, best, prompt, prompt.tokens, now)
        active.on_first, active.on_end = self._first_token, self._ended
        best.place(active, now)
        return Decision(
            best.instance, ADAPTIVE, len(books), table=table, ticket=active, rank=best.rank
        )

    async def close(self) -> None:
        self._stop_listening()
        self._loads.close()

    def _assign(self, books: list[Book], request: GenerateRequest) -> Book:
        balancer = self.balancer
        for book in books:
            balancer.update_metrics(book.name, metrics_of(book))
        try:
            name = balancer.assign([Named(book.name) for book in books], request).worker_id
        except LoadBalancingError:
            return min(books, key=lambda book: balancer.worker_metrics[book.name].current_load)
        return self._fleet[name]

    def _pick(self, equal: Sequence[str]) -> str:
        ids = {self._fleet[name].instance.id: name for name in reversed(equal)}
        return ids[self._client.pick(self._ties, ids).id]

    def _first_token(self, active: Active) -> None:
        active.book.first_token(active, self._clock.now())

    def _ended(self, active: Active) -> None:
        """How long its answer was teaches."""
        active.book.end(active, self._clock.now())
        if active.emitted:
            self.balancer.prediction_model.observe(active.prompt_tokens, active.emitted)

    def _table(self, books: list[Book]) -> tuple[Candidate, ...]:
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

    def _announced(self) -> None:
        for gone in self._fleet.replace(self._client.instances):
            self.balancer.forget(gone)


def metrics_of(book: Book) -> WorkerMetrics:
    """As the worker reports, with what was sent there since. Its load is x / (1 + x), x being the
    steps that its open prompts fill plus the share of its places that is taken: it never is full,
    but whoever comes next gets a smaller part."""
    info = book.info
    places = info.max_num_seqs if info else SEQUENCES
    prompts = book.open_tokens + book.others_tokens
    requests = len(book.active) + book.others_count
    work = prompts / book.token_budget + requests / places
    return WorkerMetrics(
        current_load=work / (1.0 + work),
        available_memory=1.0 - book.memory_share(),
        capacity_tokens=float(info.num_blocks * info.block_tokens) if info else UNKNOWN_CAPACITY,
        speed=UNKNOWN_SPEED / book.pace.factor,
    )
