"""A simulated cluster: workers with the router and admission of a deployment.

Requests skip the request plane: the router's dispatch calls the engine directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from random import Random
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from dynamo.communication.discovery import open_discovery
from dynamo.communication.events import open_events
from dynamo.communication.requests import open_requests
from dynamo.core.context import Context
from dynamo.core.reply import Reply, SendRequest
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, Load
from dynamo.core.virtual_time import VirtualClock
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.load_publisher import LoadPublisher
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.inference.sequence import SequenceContent
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.simulated_tiers import SimulatedTiers
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorker, ReplayWorkers
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import (
    Instance,
    InstanceFilter,
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
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.scheduling.router.roles import decodes, only_prefills
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LOAD_METRICS_SUFFIX, LoadView
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry

NAMESPACE, COMPONENT, ENDPOINT = "replay", "worker", "generate"
_plane_numbers = count()
OnLoadReport = Callable[[str, Load, float], None]


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
        self._workers_by_id: dict[str, ReplayWorker] = {}
        self._tiers = SimulatedTiers(workers.tiers, clock)
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
        for number, group in enumerate(self._workers):
            await self._add_worker(number, group)
        if self._workers.transfer is not None:
            for worker in self._workers_by_id.values():
                await worker.open_links(self._workers.transfer, self._workers_by_id)
        self._client = await self._open_client(decodes)
        self._prefill_client = await self._open_client(only_prefills)
        self.ledger = Ledger(self._clock, self._client, self._prefill_client)
        self._exit_stack.callback(self.ledger.close)
        self._policy = await self._open_policy()
        self._exit_stack.push_async_callback(self._policy.close)
        self._report_links()
        listeners = self._load_report_listeners()
        if self._slo is None:
            self.send = self._make_router().send
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
        admission = Admission(
            self._client,
            self.ledger,
            self._policy,
            self._clock,
            slo,
            metrics,
            prefill_client=self._prefill_client,
        )
        self._exit_stack.callback(admission.close)
        return chain([admission], self._make_router().send), admission

    def _make_router(self) -> WorkerRouter:
        return WorkerRouter(
            self._policy,
            self._dispatch,
            clock=self._clock,
            prefill_client=self._prefill_client,
            ledger=self.ledger,
        )

    @property
    def waiting(self) -> int:
        """The number of requests that the router holds."""
        return self._policy.waiting

    def deliver_computed_tokens(self) -> None:
        """Deliver the tokens that fast-forwarding engines have computed up to now."""
        for fast_forward in self._fast_forwards:
            fast_forward.catch_up()

    async def _add_worker(self, number: int, group: ReplayGroup) -> None:
        names = self._workers.names_of(number)
        worker = ReplayWorker(
            names, [self._make_engine(name, group) for name in names], self._clock
        )
        info = await worker.engine.start()
        self._exit_stack.push_async_callback(worker.stop)
        self._workers_by_id[worker.id] = worker
        instance = Instance(
            id=worker.id,
            address=f"memory://{number}",
            namespace=NAMESPACE,
            component=COMPONENT,
            endpoint=ENDPOINT,
            capabilities={"engine": msgspec.to_builtins(info), **self._transfer_capability()},
        )
        await self._discovery.put(instance_key(instance), encode_instance(instance))

    def _transfer_capability(self) -> Mapping[str, Any]:
        """Return the part of an instance record that describes the exposed KV memory."""
        if self._workers.transfer is None:
            return {}
        slot_bytes = self._workers.block_tokens * self._workers.kv_bytes_per_token
        return {"transfer": [{"slot_bytes": slot_bytes}]}

    def _make_engine(self, worker: str, group: ReplayGroup) -> BatchedEngine:
        """Create and register the engine of the worker or rank of that name, which logs its
        requests."""
        workers, engine_number = self._workers, len(self.engines)

        def log_placement(request: GenerateRequest) -> tuple[SequenceContent, int, int]:
            if request.prefill == worker:
                return self._log.on_prefill_placed(request, engine_number)
            return self._log.on_placed(request, engine_number, fast_forward)

        engine, fast_forward = make_simulated_engine(
            group.engine,
            group.timing,
            self._clock,
            resolve_request=log_placement,
            wait_until_quiescent=self._clock.wait_until_idle,
            eviction=workers.eviction,
            prefix_caching=workers.prefix_caching,
            region=workers.make_region(group.engine),
            open_tiers=self._tiers.open if workers.tiers else None,
        )
        self.engines.append(engine)
        self._fast_forwards.append(fast_forward)
        return engine

    async def _open_client(self, accepts: InstanceFilter) -> Client:
        prefix = instances_prefix(NAMESPACE, COMPONENT, ENDPOINT)
        view = InstanceView(self._discovery, self._requests, prefix, self._clock, accepts=accepts)
        await view.start()
        client = Client(f"{NAMESPACE}.{COMPONENT}.{ENDPOINT}", view, self._requests, self._rng)
        self._exit_stack.push_async_callback(client.close)
        return client

    async def _open_policy(self) -> Policy:
        block_tokens = self._workers.block_tokens
        if self._router_settings.mode == KV:
            self.cache_view = CacheView(self._clock, block_tokens=block_tokens)
            for worker in self._workers_by_id.values():
                for name, engine in zip(worker.names, worker.ranks, strict=True):
                    self.cache_view.apply(name, ())
                    engine.on_kv_events(partial(self.cache_view.apply, name))
        return await open_policy(
            PolicyInputs(
                self._router_settings,
                self._client,
                self._events,
                self._clock,
                self.ledger,
                block_tokens=block_tokens,
                read_prompt=self._read_prompt,
                view=self.cache_view,
                prefill_client=self._prefill_client,
            )
        )

    def _read_prompt(self, request: GenerateRequest) -> Prompt:
        """Return the prompt for the router, which then reads what the workers have computed."""
        self.deliver_computed_tokens()
        return self._log.prompt_of(request)

    def _report_links(self) -> None:
        """Report the rate of each link as learnt, because a trace is no test of learning it."""
        if (transfer := self._workers.transfer) is not None:
            load = Load(transfer_bytes_per_s=transfer.bytes_per_s)
            for worker in self._workers_by_id.values():
                report = replace(load, ranks=(load,) * len(worker.ranks))
                self._policy.on_load_report(worker.id, report, self._clock.now())

    def _load_report_listeners(self) -> list[OnLoadReport]:
        """Return the policy if it uses load reports."""
        settings = self._router_settings
        if settings.mode == ADAPTIVE:
            return [self._policy.on_load_report]
        reported = settings.disaggregation.itl_slo or self._workers.tiers
        if settings.mode == KV and (reported or make_cost(settings).uses_load_reports):
            return [self._policy.on_load_report]
        return []

    async def _start_load_reports(self, listeners: Sequence[OnLoadReport]) -> None:
        """Publish the workers' loads if anyone uses them, and pass them to the `listeners`."""
        if listeners:
            loads = LoadView(self._clock)
            for listener in (self.ledger.on_load_report, *listeners):
                loads.add_listener(listener)
            await loads.subscribe(self._events, f"{NAMESPACE}.{COMPONENT}")
            self._exit_stack.callback(loads.close)
        if listeners:
            for worker in self._workers_by_id.values():
                await self._publish_load(worker)

    async def _publish_load(self, worker: ReplayWorker) -> None:
        """Publish a worker's load on the event plane, as a worker of a deployment does."""
        subject = f"{NAMESPACE}.{COMPONENT}{LOAD_METRICS_SUFFIX}"
        source = await self._events.open_source(subject, worker.id, latest=True)
        self._exit_stack.push_async_callback(source.close)
        publisher = LoadPublisher(worker.engine, source, self._clock)
        worker.load_publisher = publisher
        self._tasks.start(publisher.run(), "load report")

    async def _dispatch(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Send a request to the engine of `instance` (a `SendTo`)."""
        worker = self._workers_by_id[instance.id]
        worker.on_load_changed()
        await worker.engine.generate(request, context, reply)
