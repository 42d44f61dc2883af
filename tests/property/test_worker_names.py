"""Ranks are workers: whatever counts requests or predicts times names them as the engines do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    ROLES_BY_NAME,
    EngineInfo,
    GenerateRequest,
    SamplingParams,
    StopConditions,
)
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.mock.timing import LinearTiming
from dynamo.inference.sequence import SequenceContent
from dynamo.operations.replay.cluster import COMPONENT, NAMESPACE, ReplayCluster
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceBlockConverter, TraceRequest
from dynamo.operations.replay.workers import KvTransfer, ReplayGroup, ReplayWorkers
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import Policy, WorkerRouter
from dynamo.scheduling.router.attempt import AttemptListener
from dynamo.scheduling.router.factory import PolicyInputs, connect_replicas, open_policy
from dynamo.scheduling.router.policies.remote import RemotePolicy
from dynamo.scheduling.router.policies.remote_messages import (
    QUERY_ACCEPTED,
    decode_query,
    encode_reply,
    read_query_prompt,
    request_from_query,
)
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.workers import WorkerStates

BLOCK = 64
LIMIT_S = 2.0
LONG_TOKENS = 6_000
"""A prompt of this length takes 1.8 s."""
ROUTER = "router"
SUBJECT = f"{NAMESPACE}.router/m"
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 1),  # the frontend
        st.sampled_from([30, 400, 2_000]),  # the length of the prompt
        st.integers(1, 80),  # the length of the answer
        st.integers(0, 300),  # milliseconds until the next request
        st.sampled_from([None, None, None, 0.05, 0.5]),  # seconds after which its client leaves
    ),
    min_size=1,
    max_size=16,
)
FLEETS = st.tuples(
    st.integers(1, 3),  # ranks
    st.integers(1, 2),  # instances of each role
    st.sampled_from(
        [("both", "auto"), ("both", "flexible")]
        + [("apart", mode) for mode in ("always", "predicted", "thresholds", "flexible")]
    ),
)


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
            groups.append(ReplayGroup(1, info, LinearTiming(10.0, 0.3)))
        links = KvTransfer(64e9) if transfer else None
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
    """The requests that one frontend has in flight, by worker. `active`: at the worker that
    computes the prompt, and from the first token on at the one that answers."""

    def __init__(self, sent_to: dict[str, str]) -> None:
        self.reserved: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self._sent_to = sent_to

    def track(self, instance: Instance, request: GenerateRequest) -> AttemptListener:
        worker = instance.id if request.rank is None else f"{instance.id}/{request.rank}"
        self._sent_to[request.request_id] = worker
        return TrueCount(self, worker, request.prefill or worker)


class TrueCount(AttemptListener):
    """Counts one request."""

    def __init__(self, counts: TrueCounts, worker: str, place: str) -> None:
        self.counts, self.worker, self.place = counts, worker, place
        counts.reserved[worker] += 1
        counts.active[place] += 1

    def on_first_token(self) -> None:
        self.counts.active[self.place] -= 1
        self.place = self.worker
        self.counts.active[self.place] += 1

    def on_ended(self, error: BaseException | None) -> None:
        self.counts.active[self.place] -= 1
        self.counts.reserved[self.worker] -= 1


class DirectRouter:
    """The client of one router process that is called without a request plane."""

    def __init__(self, policy: Policy, peer_requests: Any) -> None:
        self._policy, self._peer_requests = policy, peer_requests
        self.instances = {ROUTER: Instance(ROUTER, "memory://router", NAMESPACE, ROUTER, "choose")}

    def pick(self, mode: str, allowed: object) -> Instance:
        return self.instances[ROUTER]

    async def call(self, router: Instance, payload: bytes, context: Context, sink: Any) -> None:
        sink(QUERY_ACCEPTED)
        query = decode_query(payload)
        request = request_from_query(query, context.request_id)
        decision = await self._policy.choose(request, context, frozenset(query.excluded))
        self._peer_requests.reserve(decision.placement)
        sink(encode_reply(decision))

    async def close(self) -> None:
        pass


class Frontend:
    """Admission and router over a policy. `first_token_s`: seconds by request."""

    def __init__(self, cluster: NamedCluster, policy: Policy, limits: SloLimits) -> None:
        clients = cluster._client, cluster._prefill_client
        clock = cluster._clock
        self.policy = policy
        self.counts = TrueCounts(cluster.log.sent_to)
        self.admission = Admission(clients[0], policy, clock, limits, prefill_client=clients[1])
        self.router = WorkerRouter(
            policy,
            cluster._dispatch,
            clock=clock,
            prefill_client=clients[1],
            listener_factories=[self.admission.track_attempt, self.counts.track],
        )
        self.send = chain([self.admission], self.router.send)
        self.first_token_s: dict[str, float] = {}
        self.shed = 0


class NamedCluster(ReplayCluster):
    """A cluster with two frontends. In mode "remote" a router chooses for them."""

    log: CheckedLog
    remote = False

    def _read_prompt(self, request: GenerateRequest) -> Prompt:
        return read_query_prompt(request) if self.remote else super()._read_prompt(request)

    async def open_frontends(self, limits: SloLimits) -> list[Frontend]:
        """Open both. Their routers know the requests of each other in mode kv."""
        self.states: list[WorkerStates] = []
        first = self._policy
        policies = [first, await self._open_another()]
        if self.remote:
            _, peer_requests = await self._connect(first, ROUTER, publish=False)
            router: Any = DirectRouter(first, peer_requests)
            policies = [await self._open_remote(router, name) for name in ("a", "b")]
        elif self._router_settings.mode == "kv":
            for policy, name in zip(policies, ("a", "b"), strict=True):
                await self._connect(policy, name, publish=True)
        frontends = [Frontend(self, policy, limits) for policy in policies]
        loads = LoadView(self._clock)
        for frontend in frontends:
            loads.add_listener(frontend.admission.on_load_report)
        await loads.subscribe(self._events, f"{NAMESPACE}.{COMPONENT}")
        for worker in self._workers_by_id.values():
            await self._publish_load(worker)
        return frontends

    async def _open_another(self) -> Policy:
        view = CacheView(self._clock, block_tokens=BLOCK)
        return await open_policy(
            PolicyInputs(
                self._router_settings,
                self._client,
                self._events,
                self._clock,
                block_tokens=BLOCK,
                read_prompt=self._read_prompt,
                view=view,
                prefill_client=self._prefill_client,
            )
        )

    async def _connect(self, policy: Policy, name: str, *, publish: bool) -> Any:
        connected = connect_replicas(policy, self._clock, name, publish=publish)
        assert connected is not None
        await connected[0].start(self._events, SUBJECT)
        self._exit_stack.push_async_callback(connected[0].close)
        assert policy.worker_states is not None
        self.states.append(policy.worker_states)
        return connected

    async def _open_remote(self, router: Any, name: str) -> Policy:
        replicas = ReplicaSync(self._clock, name)
        await replicas.start(self._events, SUBJECT)
        self._exit_stack.push_async_callback(replicas.close)
        return RemotePolicy(
            self._client,
            router,
            replicas,
            self._log.prompt_of,
            self._clock,
            block_tokens=BLOCK,
            prefill_client=self._prefill_client,
        )


class Trial:
    """A fleet under requests of two frontends, which checks all counts by worker name."""

    def __init__(
        self, fleet: Fleet, cluster: NamedCluster, frontends: Sequence[Frontend], clock: Any
    ) -> None:
        self.fleet, self.cluster, self.frontends, self.clock = fleet, cluster, frontends, clock
        self._rows = 0

    async def send(
        self, frontend: Frontend, prompt: int, answer: int, timeout_s: float | None = None
    ) -> None:
        """Send a request and wait for its end; its client leaves after `timeout_s`."""
        row, log = self._rows, self.cluster.log
        self._rows += 1
        turn = TraceRequest(row, prompt, answer)
        reply = log.on_arrival(turn)
        ids, stops = bytes(prompt * TOKEN_BYTES), StopConditions(answer)
        request = GenerateRequest(str(row), "m", ids, SamplingParams(), stops)
        try:
            async with asyncio.timeout(timeout_s):
                await frontend.send(request, Context(str(row)), reply)
            frontend.first_token_s[str(row)] = reply.first_token_s - reply.arrived_s
        except Overloaded:
            frontend.shed += 1
        except TimeoutError:
            pass
        finally:
            log.on_ended(turn)

    async def check(self) -> None:
        """Check all names and counts, once the events that are on their way have arrived."""
        for _ in range(10):
            await asyncio.sleep(0)
        total: Counter[str] = Counter()
        for frontend in self.frontends:
            total += frontend.counts.active
            self._check_admission(frontend)
        for states in self.cluster.states:
            assert count_active(states) == total

    def _check_admission(self, frontend: Frontend) -> None:
        capacity = frontend.admission.capacity
        assert list(capacity.workers) == self.fleet.names("both", "decode")
        reserved = {name: len(worker.reservations) for name, worker in capacity.workers.items()}
        assert Counter(reserved) == frontend.counts.reserved
        for name, worker in capacity.workers.items():
            assert worker.state is not None
            assert worker.state.name == name
        states = frontend.policy.worker_states or frontend.admission._prompt_workers.states
        assert {worker.name for worker in states.workers} == {
            *self.fleet.names("both", "decode", "prefill")
        }
        if frontend.policy.worker_states is None:
            assert count_active(states) == +frontend.counts.active


def count_active(states: WorkerStates) -> Counter[str]:
    """Return the number of requests by worker, without those that have none."""
    return +Counter({worker.name: len(worker.active) for worker in states.workers})


@asynccontextmanager
async def open_trial(
    clock: VirtualClock, fleet: Fleet, mode: str, disaggregation: str
) -> AsyncIterator[Trial]:
    rules = DisaggregationSettings(mode=disaggregation, prefill_length_threshold=100)
    routing = RouterSettings(mode="kv" if mode == "remote" else mode, disaggregation=rules)
    workers = fleet.make_workers(transfer=disaggregation != "auto")
    log = CheckedLog(clock, TraceBlockConverter(BLOCK, BLOCK), BLOCK)
    log.names, log.sent_to = fleet.names("both", "decode", "prefill"), {}
    cluster = NamedCluster(workers, routing, log, clock, Random(1))
    cluster.log, cluster.remote = log, mode == "remote"
    async with cluster:
        clock.on_time_advanced(cluster.deliver_computed_tokens)
        limits = SloLimits(ttft_s=LIMIT_S, disaggregation=rules)
        frontends = await cluster.open_frontends(limits)
        await clock.sleep(0.5)
        yield Trial(fleet, cluster, frontends, clock)


async def send_all(trial: Trial, requests: Sequence[Any]) -> None:
    """Send requests, and check all counts while they are in flight and after their ends."""
    async with BackgroundTasks() as tasks:
        for frontend, prompt, answer, pause_ms, timeout_s in requests:
            tasks.start(trial.send(trial.frontends[frontend], prompt, answer, timeout_s))
            await trial.clock.sleep(pause_ms * 1e-3 + 0.000_37)
            await trial.check()
        await tasks.join()
    await trial.clock.sleep(1.0)
    await trial.check()
    assert all(not +frontend.counts.reserved for frontend in trial.frontends)


async def overload(trial: Trial) -> None:
    """Send many long prompts at once: each rank answers one or two of them, the rest are shed."""
    frontend, fleet = trial.frontends[0], trial.fleet
    ranks = len(fleet.names("both", "prefill", "decode"))
    for _ in range(4 * ranks):  # the time of long prompts is learnt
        await trial.send(frontend, LONG_TOKENS, 4)
    frontend.first_token_s.clear()
    async with BackgroundTasks() as tasks:
        for _ in range(8 * ranks):
            tasks.start(trial.send(frontend, LONG_TOKENS, 4))
            await trial.clock.sleep(0.001)
            await trial.check()
        await tasks.join()
    assert frontend.shed >= 6 * ranks
    assert max(frontend.first_token_s.values()) < 2 * LIMIT_S


@pytest.mark.parametrize("mode", ["round_robin", "least_loaded", "adaptive", "kv", "remote"])
@settings(max_examples=10)
@given(fleet=FLEETS, requests=REQUESTS)
def test_ranks_are_workers_wherever_they_are_named(
    mode: str, fleet: tuple[int, int, tuple[str, str]], requests: Sequence[Any]
) -> None:
    ranks, instances, (roles, disaggregation) = fleet
    role_names = ("prefill", "decode") if roles == "apart" else ("both",)

    async def main(clock: VirtualClock) -> None:
        named = Fleet(ranks, [role for role in role_names for _ in range(instances)])
        async with open_trial(clock, named, mode, disaggregation) as trial:
            await send_all(trial, requests)
            await overload(trial)

    run_in_virtual_time(main)
