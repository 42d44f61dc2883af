"""Simulated workers, and the router and admission before them, as a deployment has them; only the
wire is left out: what the router sends is handed to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from random import Random
from typing import Self

import msgspec
from msgspec.structs import replace

from dynamo.communication.discovery import open_discovery
from dynamo.communication.events import open_events
from dynamo.communication.requests import open_requests
from dynamo.core.context import Context
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import Engine, Reply, Send
from dynamo.core.settings.schema_router import Router as RouterSettings
from dynamo.core.tasks import Tasks
from dynamo.core.values import EngineInfo, GenerateRequest, Load
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.leap import Leaper
from dynamo.inference.load_report import LoadReport
from dynamo.inference.mock.simulated import make_simulated
from dynamo.inference.mock.timing import Timing
from dynamo.inference.ranked import RankedEngine
from dynamo.operations.replay.flight import FlightLog
from dynamo.runtime.client import Client
from dynamo.runtime.instances import (
    Instance,
    InstanceView,
    encode_instance,
    instance_key,
    workers_prefix,
)
from dynamo.scheduling.admission import Admission, Promise
from dynamo.scheduling.assembly import assemble
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.router import Policy, Router
from dynamo.scheduling.router.adaptive.policy import ADAPTIVE
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.scheduling.router.loads import LOADS, LoadView
from dynamo.scheduling.router.opening import KV, open_policy
from dynamo.telemetry import Registry

NAMESPACE, COMPONENT, ENDPOINT = "replay", "worker", "generate"
_places = count()
Hear = Callable[[str, Load, float], None]


class Workers(msgspec.Struct, frozen=True):
    """How many, each with `ranks` times `engine`, as fast as `timing` says. `num_blocks`: of each
    in turn, where their memories differ."""

    number: int
    engine: EngineInfo
    timing: Timing
    eviction: str
    num_blocks: tuple[int, ...] = ()
    ranks: int = 1
    prefix_caching: bool = True

    def engine_of(self, number: int) -> EngineInfo:
        """What the engine of one of them is."""
        if not self.num_blocks:
            return self.engine
        blocks = self.num_blocks[number % len(self.num_blocks)]
        return replace(self.engine, num_blocks=blocks)


class Simulated(Engine):
    """One engine of a cluster, that says what comes to it. `number`: among all engines."""

    def __init__(self, engine: BatchedEngine, leaper: Leaper, number: int, log: FlightLog) -> None:
        self._engine = engine
        self._leaper = leaper
        self._number = number
        self._log = log

    async def start(self) -> EngineInfo:
        return await self._engine.start()

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self._log.placed(request, self._number, self._leaper)
        await self._engine.generate(request, context, reply)

    def load(self) -> Load:
        return self._engine.load()

    async def stop(self) -> None:
        await self._engine.stop()


class Cluster:
    """`async with Cluster(...)`: started. `send` is a `Send`, through admission where there is a
    `promise`; `engines`: those of the first worker's ranks, then of the second's, and so on."""

    def __init__(
        self,
        workers: Workers,
        routing: RouterSettings,
        log: FlightLog,
        clock: VirtualClock,
        rng: Random,
        promise: Promise | None = None,
    ) -> None:
        self._workers = workers
        self._routing = routing
        self._promise = promise
        self._log = log
        self._clock = clock
        self._rng = rng
        self._stack = AsyncExitStack()
        self._leapers: list[Leaper] = []
        self._reports: list[LoadReport] = []
        self._served: list[Engine] = []
        self._tasks = Tasks()
        self.send: Send
        self.engines: list[BatchedEngine] = []
        self.view: CacheView | None = None
        """What the router knows of the caches, in mode kv."""

    async def __aenter__(self) -> Self:
        place = f"memory:replay-{next(_places)}"
        self._discovery = await open_discovery(place)
        self._stack.push_async_callback(self._discovery.close)
        self._events = await open_events(place, self._discovery)
        self._stack.push_async_callback(self._events.close)
        self._requests = await open_requests("memory:")
        self._stack.push_async_callback(self._requests.close)
        await self._stack.enter_async_context(self._tasks)
        for number in range(self._workers.number):
            await self._add(number)
        self._client = await self._connect()
        self._policy = await self._open_policy()
        self._stack.push_async_callback(self._policy.close)
        hearers = self._costs_that_hear()
        if self._promise is None:
            self.send = Router(self._policy, self._dispatch, clock=self._clock).send
        else:
            self.send, admission = self.admit(self._promise)
            hearers.append(admission.reported)
        await self._hear(hearers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def admit(self, promise: Promise, metrics: Registry | None = None) -> tuple[Send, Admission]:
        """Everything that a request passes, with admission first."""
        admission = Admission(self._client, self._policy, self._clock, promise, metrics)
        self._stack.callback(admission.close)
        router = Router(self._policy, self._dispatch, clock=self._clock, follow=[admission.follow])
        return assemble([admission], router.send), admission

    def catch_up(self) -> None:
        """Hand out every token that is computed by now."""
        for leaper in self._leapers:
            leaper.catch_up()

    async def _add(self, number: int) -> None:
        ranks = [self._simulate(number) for _ in range(self._workers.ranks)]
        served = ranks[0] if len(ranks) == 1 else RankedEngine(ranks)
        info = await served.start()
        self._stack.push_async_callback(served.stop)
        self._served.append(served)
        instance = Instance(
            id=str(number),
            address=f"memory://{number}",
            namespace=NAMESPACE,
            component=COMPONENT,
            endpoint=ENDPOINT,
            capabilities={"engine": msgspec.to_builtins(info)},
        )
        await self._discovery.put(instance_key(instance), encode_instance(instance))

    def _simulate(self, number: int) -> Simulated:
        """One more engine of that worker."""
        workers = self._workers
        engine, leaper = make_simulated(
            workers.engine_of(number),
            workers.timing,
            self._clock,
            known=self._log.known,
            settled=self._clock.settled,
            eviction=workers.eviction,
            prefix_caching=workers.prefix_caching,
        )
        self.engines.append(engine)
        self._leapers.append(leaper)
        return Simulated(engine, leaper, len(self.engines) - 1, self._log)

    async def _connect(self) -> Client:
        prefix = workers_prefix(NAMESPACE, COMPONENT, ENDPOINT)
        view = InstanceView(self._discovery, self._requests, prefix, self._clock)
        await view.start()
        client = Client(f"{NAMESPACE}.{COMPONENT}.{ENDPOINT}", view, self._requests, self._rng)
        self._stack.push_async_callback(client.close)
        return client

    async def _open_policy(self) -> Policy:
        block_tokens = self._workers.engine.block_tokens
        if self._routing.mode == KV:
            self.view = CacheView(self._clock, block_tokens=block_tokens)
            ranks = self._workers.ranks
            for number, engine in enumerate(self.engines):
                worker, rank = divmod(number, ranks)
                name = worker_name(str(worker), rank if ranks > 1 else None)
                self._tell(engine, self.view, name)
        return await open_policy(
            self._routing,
            self._client,
            self._events,
            self._clock,
            block_tokens=block_tokens,
            read=self._log.read,
            view=self.view,
        )

    def _costs_that_hear(self) -> list[Hear]:
        """Who goes by what workers report of themselves, in mode kv."""
        policy = self._policy
        if isinstance(policy, KvPolicy) and policy.placement.cost.reads_loads:
            return [policy.placement.fleet.reported]
        return []

    async def _hear(self, hearers: Sequence[Hear]) -> None:
        """Let workers report to them."""
        if hearers:
            loads = LoadView(self._clock)
            for hearer in hearers:
                loads.on_report(hearer)
            await loads.follow(self._events, f"{NAMESPACE}.{COMPONENT}")
            self._stack.callback(loads.close)
        if hearers or self._routing.mode == ADAPTIVE:
            for number, engine in enumerate(self._served):
                await self._report(engine, str(number))

    async def _report(self, engine: Engine, name: str) -> None:
        """Let the router hear of the engine's load as it does in a deployment."""
        subject = f"{NAMESPACE}.{COMPONENT}{LOADS}"
        source = await self._events.source(subject, name, latest=True)
        self._stack.push_async_callback(source.close)
        report = LoadReport(engine, source, self._clock)
        self._reports.append(report)
        self._tasks.start(report.run(), "load report")

    def _tell(self, engine: BatchedEngine, view: CacheView, name: str) -> None:
        view.apply(name, ())
        engine.on_kv_events(lambda changes: view.apply(name, changes))

    async def _dispatch(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """A `SendTo`."""
        number = int(instance.id)
        for report in self._reports[number : number + 1]:
            report.touch()
        with self._client.counted(instance):
            await self._served[number].generate(request, context, reply)
