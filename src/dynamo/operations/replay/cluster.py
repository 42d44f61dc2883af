"""A simulated cluster: workers with the router and admission of a deployment.

Requests skip the request plane: the router's dispatch calls the engine directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
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
from dynamo.core.reply import Engine, Reply, SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, GenerateRequest, Load
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.load_publisher import LoadPublisher
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.inference.mock.timing import StepTiming
from dynamo.inference.sequence import SequenceContent
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import (
    Instance,
    InstanceView,
    encode_instance,
    instance_key,
    instances_prefix,
)
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import Policy, WorkerRouter
from dynamo.scheduling.router.factory import KV, PolicyInputs, make_cost, open_policy
from dynamo.scheduling.router.load_view import LOAD_METRICS_SUFFIX, LoadView
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.telemetry import Registry

NAMESPACE, COMPONENT, ENDPOINT = "replay", "worker", "generate"
_plane_numbers = count()
OnLoadReport = Callable[[str, Load, float], None]


class ReplayWorkers(msgspec.Struct, frozen=True):
    """`count` workers with `ranks` engines each. If `num_blocks` is not empty, the workers take its
    values in turn for their number of blocks."""

    count: int
    engine: EngineInfo
    timing: StepTiming
    eviction: str
    num_blocks: tuple[int, ...] = ()
    ranks: int = 1
    prefix_caching: bool = True

    def engine_info_of(self, number: int) -> EngineInfo:
        """Return the engine info of worker `number`."""
        sizes = self.num_blocks or (self.engine.num_blocks,)
        return replace(self.engine, num_blocks=sizes[number % len(sizes)])


class ReplayCluster:
    """A cluster that runs inside `async with`. `send` passes requests through the router, and
    through admission if there is an `slo`. `engines` holds the ranks of the first worker, then
    those of the second, and so on."""

    def __init__(
        self,
        workers: ReplayWorkers,
        router_settings: RouterSettings,
        log: ReplayLog,
        clock: VirtualClock,
        rng: Random,
        slo: SloLimits | None = None,
    ) -> None:
        self._workers = workers
        self._router_settings = router_settings
        self._slo = slo
        self._log = log
        self._clock = clock
        self._rng = rng
        self._exit_stack = AsyncExitStack()
        self._fast_forwards: list[FastForward] = []
        self._load_publishers: list[LoadPublisher] = []
        self._worker_engines: list[Engine] = []
        self._tasks = BackgroundTasks()
        self.send: SendRequest
        self.engines: list[BatchedEngine] = []
        self.cache_view: CacheView | None = None
        """The router's index of the caches in mode kv, else None."""

    async def __aenter__(self) -> Self:
        url = f"memory:replay-{next(_plane_numbers)}"
        self._discovery = await open_discovery(url)
        self._exit_stack.push_async_callback(self._discovery.close)
        self._events = await open_events(url, self._discovery)
        self._exit_stack.push_async_callback(self._events.close)
        self._requests = await open_requests("memory:")
        self._exit_stack.push_async_callback(self._requests.close)
        await self._exit_stack.enter_async_context(self._tasks)
        for number in range(self._workers.count):
            await self._add_worker(number)
        self._client = await self._open_client()
        self._policy = await self._open_policy()
        self._exit_stack.push_async_callback(self._policy.close)
        listeners = self._load_report_listeners()
        if self._slo is None:
            self.send = WorkerRouter(self._policy, self._dispatch, clock=self._clock).send
        else:
            self.send, admission = self.add_admission(self._slo)
            listeners.append(admission.on_load_report)
        await self._start_load_reports(listeners)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()

    def add_admission(
        self, slo: SloLimits, metrics: Registry | None = None
    ) -> tuple[SendRequest, Admission]:
        """Return a `send` that passes requests through admission and router, and the admission."""
        admission = Admission(self._client, self._policy, self._clock, slo, metrics)
        self._exit_stack.callback(admission.close)
        router = WorkerRouter(
            self._policy,
            self._dispatch,
            clock=self._clock,
            listener_factories=[admission.track_attempt],
        )
        return chain([admission], router.send), admission

    def deliver_computed_tokens(self) -> None:
        """Deliver the tokens that fast-forwarding engines have computed up to now."""
        for fast_forward in self._fast_forwards:
            fast_forward.catch_up()

    async def _add_worker(self, number: int) -> None:
        ranks = [self._make_engine(number) for _ in range(self._workers.ranks)]
        engine = ranks[0] if len(ranks) == 1 else DataParallelEngine(ranks)
        info = await engine.start()
        self._exit_stack.push_async_callback(engine.stop)
        self._worker_engines.append(engine)
        instance = Instance(
            id=str(number),
            address=f"memory://{number}",
            namespace=NAMESPACE,
            component=COMPONENT,
            endpoint=ENDPOINT,
            capabilities={"engine": msgspec.to_builtins(info)},
        )
        await self._discovery.put(instance_key(instance), encode_instance(instance))

    def _make_engine(self, number: int) -> BatchedEngine:
        """Create and register an engine of worker `number`, which logs its requests."""
        workers, engine_number = self._workers, len(self.engines)

        def log_placement(request: GenerateRequest) -> tuple[SequenceContent, int, int]:
            return self._log.on_placed(request, engine_number, fast_forward)

        engine, fast_forward = make_simulated_engine(
            workers.engine_info_of(number),
            workers.timing,
            self._clock,
            resolve_request=log_placement,
            wait_until_quiescent=self._clock.wait_until_idle,
            eviction=workers.eviction,
            prefix_caching=workers.prefix_caching,
        )
        self.engines.append(engine)
        self._fast_forwards.append(fast_forward)
        return engine

    async def _open_client(self) -> Client:
        prefix = instances_prefix(NAMESPACE, COMPONENT, ENDPOINT)
        view = InstanceView(self._discovery, self._requests, prefix, self._clock)
        await view.start()
        client = Client(f"{NAMESPACE}.{COMPONENT}.{ENDPOINT}", view, self._requests, self._rng)
        self._exit_stack.push_async_callback(client.close)
        return client

    async def _open_policy(self) -> Policy:
        block_tokens = self._workers.engine.block_tokens
        if self._router_settings.mode == KV:
            self.cache_view = CacheView(self._clock, block_tokens=block_tokens)
            ranks = self._workers.ranks
            for number, engine in enumerate(self.engines):
                worker, rank = divmod(number, ranks)
                name = worker_name(str(worker), rank if ranks > 1 else None)
                self.cache_view.apply(name, ())
                engine.on_kv_events(partial(self.cache_view.apply, name))
        return await open_policy(
            PolicyInputs(
                self._router_settings,
                self._client,
                self._events,
                self._clock,
                block_tokens=block_tokens,
                read_prompt=self._log.prompt_of,
                view=self.cache_view,
            )
        )

    def _load_report_listeners(self) -> list[OnLoadReport]:
        """Return the listeners of load reports that the policy has in mode kv."""
        states = self._policy.worker_states
        if states is not None and make_cost(self._router_settings).uses_load_reports:
            return [states.on_load_report]
        return []

    async def _start_load_reports(self, listeners: Sequence[OnLoadReport]) -> None:
        """Publish the workers' loads if anyone uses them, and pass them to the `listeners`."""
        if listeners:
            loads = LoadView(self._clock)
            for listener in listeners:
                loads.add_listener(listener)
            await loads.subscribe(self._events, f"{NAMESPACE}.{COMPONENT}")
            self._exit_stack.callback(loads.close)
        if listeners or self._router_settings.mode == ADAPTIVE:
            for number, engine in enumerate(self._worker_engines):
                await self._publish_load(engine, str(number))

    async def _publish_load(self, engine: Engine, name: str) -> None:
        """Publish the engine's load on the event plane, as a worker of a deployment does."""
        subject = f"{NAMESPACE}.{COMPONENT}{LOAD_METRICS_SUFFIX}"
        source = await self._events.open_source(subject, name, latest=True)
        self._exit_stack.push_async_callback(source.close)
        publisher = LoadPublisher(engine, source, self._clock)
        self._load_publishers.append(publisher)
        self._tasks.start(publisher.run(), "load report")

    async def _dispatch(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Send a request to the engine of `instance` (a `SendTo`)."""
        number = int(instance.id)
        for publisher in self._load_publishers[number : number + 1]:
            publisher.on_load_changed()
        with self._client.track_call(instance):
            await self._worker_engines[number].generate(request, context, reply)
