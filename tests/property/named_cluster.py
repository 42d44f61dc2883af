"""A cluster with two frontends whose counts by worker name a test compares with the engines'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import (
    ROLES_BY_NAME,
    EngineInfo,
    Finish,
    GenerateRequest,
    Started,
)
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.sequence import SequenceContent
from dynamo.operations.replay.cluster import COMPONENT, NAMESPACE, ReplayCluster
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission import Admission
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import Policy, WorkerRouter
from dynamo.scheduling.router.factory import open_policy
from dynamo.scheduling.router.policies.remote import RemotePolicy
from dynamo.scheduling.router.policies.remote_messages import (
    QUERY_ACCEPTED,
    decode_query,
    encode_reply,
    read_query_prompt,
    request_from_query,
)
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.router import SendTo
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry

BLOCK = 64
ROUTER = "router"
SUBJECT = f"{NAMESPACE}.router/m"


class Fleet(NamedTuple):
    """Instances `0`, `1`, ... and the names of their ranks: `0/0`, `0/1`, ..."""

    ranks: int
    roles: Sequence[str]

    def name(self, instance: int, rank: int) -> str:
        return f"{instance}/{rank}" if self.ranks > 1 else str(instance)

    def names(self, *roles: str) -> list[str]:
        instances = [number for number, role in enumerate(self.roles) if role in roles]
        return [self.name(number, rank) for number in instances for rank in range(self.ranks)]

    def make_workers(self, *, transfer: bool) -> ReplayWorkers:
        groups = []
        for role in self.roles:
            info = EngineInfo(
                "mock", BLOCK, 4096, 4096 * BLOCK, 64, 8192, roles=ROLES_BY_NAME[role]
            )
            groups.append(ReplayGroup(1, info, Timing(10.0, 0.3)))
        links = 64e9 if transfer else None
        return ReplayWorkers(groups, "lru", ranks=self.ranks, transfer=links)


class CheckedLog(ReplayLog):
    """Checks that each engine gets the requests and prompts that name it."""

    names: Sequence[str]
    sent_to: dict[str, str]

    def on_placed(
        self, request: GenerateRequest, worker: int, fast_forward: FastForward
    ) -> tuple[SequenceContent, int, int]:
        assert self.names[worker] == self.sent_to[request.request_id]
        return super().on_placed(request, worker, fast_forward)

    def on_prefill_placed(
        self, request: GenerateRequest, worker: int
    ) -> tuple[SequenceContent, int, int]:
        assert self.names[worker] == request.prefill
        return super().on_prefill_placed(request, worker)


class TrueCounts:
    """The requests that one frontend has in flight, by worker, as engines get them. `active`: at
    the worker that computes the prompt, and from the first token on at the one that answers."""

    def __init__(self, sent_to: dict[str, str], send: SendTo) -> None:
        self.reserved: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.failures: dict[str, int] = {}
        """Tokens after which the worker of a request fails, once."""
        self._sent_to, self._send = sent_to, send

    async def send(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Send a request to its engine (a `SendTo`)."""
        worker = instance.id if request.rank is None else f"{instance.id}/{request.rank}"
        self._sent_to[request.request_id] = worker
        counted = CountedReply(reply, self, worker, request.prefill or worker)
        counted.failing_after = self.failures.pop(request.request_id, None)
        self.reserved[worker] += 1
        self.active[counted.place] += 1
        try:
            if counted.failing_after != 0:
                await self._send(instance, request, context, counted)
            if counted.failing_after == 0:
                failure = WorkerFailed("the worker fails")
                failure.instance = instance.id
                raise failure
        finally:
            self.active[counted.place] -= 1
            self.reserved[worker] -= 1


class CountedReply(Reply):
    """Moves a request to the worker that answers with its first token."""

    failing_after: int | None = None

    def __init__(self, reply: Reply, counts: TrueCounts, worker: str, place: str) -> None:
        self._reply, self._counts, self._worker, self.place = reply, counts, worker, place

    def begin(self, started: Started) -> None:
        self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: Any = None) -> bool:
        self._counts.active[self.place] -= 1
        self.place = self._worker
        self._counts.active[self.place] += 1
        wanted = self._reply.tokens(ids, logprobs)
        if self.failing_after is not None:
            self.failing_after = max(0, self.failing_after - len(ids))
            return wanted and self.failing_after > 0
        return wanted

    def finish(self, end: Finish) -> None:
        if self.failing_after is None:
            self._reply.finish(end)


class DirectRouter:
    """The client of one router process that is called without a request plane."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.instances = {ROUTER: Instance(ROUTER, "memory://router", NAMESPACE, ROUTER, "choose")}

    def pick(self, mode: str, allowed: object) -> Instance:
        return self.instances[ROUTER]

    async def call(self, router: Instance, payload: bytes, context: Context, sink: Any) -> None:
        sink(QUERY_ACCEPTED)
        query = decode_query(payload)
        request = request_from_query(query, context.request_id)
        decision = await self._policy.choose(request, context, frozenset(query.excluded))
        sink(encode_reply(decision))

    async def close(self) -> None:
        pass


class Frontend:
    """Admission, migration and router over a policy. `first_token_s`: seconds by request."""

    def __init__(
        self, cluster: NamedCluster, policy: Policy, ledger: Ledger, limits: RouterSettings
    ) -> None:
        clients = cluster.client, cluster.prefill_client
        clock = cluster.clock
        self.policy, self.ledger = policy, ledger
        self.counts = TrueCounts(cluster.log.sent_to, cluster._dispatch)
        self.admission = Admission(
            clients[0], ledger, policy, clock, limits, prefill_client=clients[1]
        )
        self.router = WorkerRouter(
            policy, self.counts.send, clock=clock, prefill_client=clients[1], ledger=ledger
        )
        migration = Migration(clock, Random(1), Registry())
        self.send = chain([self.admission, migration], self.router.send)
        self.first_token_s: dict[str, float] = {}
        self.shed = 0


class NamedCluster(ReplayCluster):
    """A cluster with two frontends. In mode "remote" a router chooses for them."""

    log: CheckedLog
    remote = False

    def _read_prompt(self, request: GenerateRequest) -> Prompt:
        return read_query_prompt(request) if self.remote else super()._read_prompt(request)

    async def open_frontends(self, limits: RouterSettings) -> list[Frontend]:
        """Open both. Their routers know the requests of each other in mode kv."""
        self.states: list[Ledger] = []
        policies, ledgers = [self.policy], [self.ledger]
        if self.remote:
            await self._connect(self.ledger, ROUTER, publish=False)
            router: Any = DirectRouter(self.policy)
            self.router_ledger = self.ledger
            ledgers = [self._open_ledger(), self._open_ledger()]
            policies = [self._open_remote(router) for _ in ledgers]
        else:
            ledgers.append(self._open_ledger())
            policies.append(await self._open_another(ledgers[1]))
        if self.settings.mode == "kv":
            for ledger, name in zip(ledgers, ("a", "b"), strict=True):
                await self._connect(ledger, name, apply=not self.remote)
        frontends = [
            Frontend(self, policy, ledger, limits)
            for policy, ledger in zip(policies, ledgers, strict=True)
        ]
        loads = LoadView(self.clock)
        for frontend in frontends:
            loads.add_listener(frontend.ledger.on_load_report)
            loads.add_listener(frontend.admission.on_load_report)
        await loads.subscribe(self.events, f"{NAMESPACE}.{COMPONENT}")
        await self.publish_loads()
        return frontends

    def _open_ledger(self) -> Ledger:
        return Ledger(self.clock, self.client, self.prefill_client)

    async def _open_another(self, ledger: Ledger) -> Policy:
        view = CacheView(self.clock, block_tokens=BLOCK)
        return await open_policy(
            PolicyInputs(
                self.settings,
                self.client,
                self.events,
                self.clock,
                ledger,
                block_tokens=BLOCK,
                read_prompt=self._read_prompt,
                view=view,
                prefill_client=self.prefill_client,
            )
        )

    async def _connect(
        self, ledger: Ledger, name: str, *, publish: bool = True, apply: bool = True
    ) -> None:
        sync = ReplicaSync(self.clock, name, ledger, publish=publish, apply=apply)
        await sync.start(self.events, SUBJECT)
        self.resources.push_async_callback(sync.close)
        if apply:
            self.states.append(ledger)

    def _open_remote(self, router: Any) -> Policy:
        return RemotePolicy(
            self.client,
            router,
            self._log.prompt_of,
            self.clock,
            block_tokens=BLOCK,
            prefill_client=self.prefill_client,
        )
