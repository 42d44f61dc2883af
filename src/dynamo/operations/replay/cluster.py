"""A simulated cluster: workers with the router and admission of a deployment.

Requests skip the request plane: the router's dispatch calls the engine directly.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from dynamo.core.reply import Operator, Reply
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
from dynamo.operations.replay.workers import (
    ReplayGroup,
    ReplayWorker,
    ReplayWorkers,
    SimulatedTiers,
)
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import (
    Instance,
    InstanceFilter,
    InstanceView,
    encode_instance,
    instance_key,
    instances_prefix,
)
from dynamo.runtime.calls.load_balancing import resolve_mode_alias
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.pipeline import (
    Stage,
    StagedPipeline,
    chain,
    open_admission,
    open_ledger,
    open_loads,
    open_router,
)
from dynamo.scheduling.router import Policy
from dynamo.scheduling.router.factory import KV, make_cost, open_policy
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.workers.load_view import LOAD_METRICS_SUFFIX
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry

NAMESPACE, COMPONENT, ENDPOINT = "replay", "worker", "generate"
_plane_numbers = count()


class ReplayCluster(StagedPipeline):
    """A cluster that runs inside `async with`. `send` passes requests through the router, and
    through `admission` if wanted. `engines` holds the ranks of the first worker, then those of
    the next one to serve, and so on. `migrates`: requests of workers that die go on at others."""

    def __init__(
        self,
        workers: ReplayWorkers,
        router_settings: RouterSettings,
        log: ReplayLog,
        clock: VirtualClock,
        rng: Random,
        *,
        admission: bool = False,
        migrates: bool = False,
    ) -> None:
        super().__init__(router_settings, clock, Registry())
        self.admits = admission
        self.workers = workers
        self._log = log
        self.rng = rng
        self._fast_forwards: list[FastForward] = []
        self._workers_by_id: dict[str, ReplayWorker] = {}
        self._tiers = SimulatedTiers(workers.tiers, clock)
        self._tasks = BackgroundTasks()
        self._wait_until_idle = clock.wait_until_idle
        self.dispatch_to = self._dispatch
        self.engines: list[BatchedEngine] = []
        self._publishes_loads = False
        self.migrates = migrates

    async def __aenter__(self) -> Self:
        url = f"memory:replay-{next(_plane_numbers)}"
        self._discovery = await open_discovery(url)
        self.resources.push_async_callback(self._discovery.close)
        self.events = await open_events(url, self._discovery)
        self.resources.push_async_callback(self.events.close)
        self._requests = await open_requests("memory:")
        self.resources.push_async_callback(self._requests.close)
        await self.resources.enter_async_context(self._tasks)
        for number, group in enumerate(self.workers):
            await self._add_worker(number, group)
        await self.open([row for row in STAGES if row.name != "admission" or self.admits])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """The number of requests that the router holds."""
        return self.policy.waiting

    def deliver_computed_tokens(self) -> None:
        """Deliver the tokens that fast-forwarding engines have computed up to now."""
        for fast_forward in self._fast_forwards:
            fast_forward.catch_up()

    async def _add_worker(self, number: int, group: ReplayGroup) -> ReplayWorker:
        names = self.workers.names_of(number)
        first = number * self.workers.ranks
        engines = [self._make_engine(*each, group) for each in enumerate(names, first)]
        worker = ReplayWorker(str(number), names, engines, self.clock)
        worker.info = await worker.engine.start()
        self.resources.push_async_callback(worker.stop)
        self._workers_by_id[worker.id] = worker
        if self.workers.transfer is not None:
            await worker.open_links(self.workers.transfer, self._workers_by_id)
        await self.announce(worker, group)
        return worker

    async def start_worker(self, number: int, group: ReplayGroup) -> None:
        """Add a worker to the cluster that runs."""
        worker = await self._add_worker(number, group)
        self._follow_events(worker)
        await self._wait_until_idle()  # the router knows the worker then
        self._report_link(worker)
        if self._publishes_loads:
            await self._publish_load(worker)

    def worker(self, number: int) -> ReplayWorker | None:
        """Return the worker of that number, also one that is gone; None if it has not started."""
        return self._workers_by_id.get(str(number))

    async def announce(self, worker: ReplayWorker, group: ReplayGroup) -> None:
        """Write the record of a worker, with the present roles of `group`."""
        info = replace(worker.info, roles=group.engine.roles)
        instance = Instance(
            id=worker.id,
            address=f"memory://{worker.id}",
            namespace=NAMESPACE,
            component=COMPONENT,
            endpoint=ENDPOINT,
            capabilities={"engine": msgspec.to_builtins(info), **self._transfer_capability()},
        )
        worker.record_key = instance_key(instance)
        await self._discovery.put(worker.record_key, encode_instance(instance))

    async def withdraw(self, worker: ReplayWorker) -> None:
        """Let the router see a worker no more."""
        await self._discovery.delete(worker.record_key)
        await self._wait_until_idle()
        if self.cache_view is not None:
            for name in worker.names:
                self.cache_view.remove_worker(name)

    def _transfer_capability(self) -> Mapping[str, Any]:
        """Return the part of an instance record that describes the exposed KV memory."""
        if self.workers.transfer is None:
            return {}
        slot_bytes = self.workers.block_tokens * self.workers.kv_bytes_per_token
        return {"transfer": [{"slot_bytes": slot_bytes}]}

    def _make_engine(self, engine_number: int, worker: str, group: ReplayGroup) -> BatchedEngine:
        """Create and register the engine of the worker or rank of that name, which logs its
        requests."""
        workers = self.workers

        def log_placement(request: GenerateRequest) -> tuple[SequenceContent, int, int]:
            if request.prefill == worker:
                return self._log.on_prefill_placed(request, engine_number)
            return self._log.on_placed(request, engine_number, fast_forward)

        engine, fast_forward = make_simulated_engine(
            group.engine,
            group.timing,
            self.clock,
            resolve_request=log_placement,
            wait_until_quiescent=self._wait_until_idle,
            eviction=workers.eviction,
            prefix_caching=workers.prefix_caching,
            region=workers.make_region(group.engine),
            open_tiers=self._tiers.open if workers.tiers else None,
        )
        self.engines.append(engine)
        self._fast_forwards.append(fast_forward)
        return engine

    async def open_client(self, accepts: InstanceFilter) -> Client:
        prefix = instances_prefix(NAMESPACE, COMPONENT, ENDPOINT)
        view = InstanceView(self._discovery, self._requests, prefix, self.clock, accepts=accepts)
        await view.start()
        client = Client(f"{NAMESPACE}.{COMPONENT}.{ENDPOINT}", view, self._requests, self.rng)
        self.resources.push_async_callback(client.close)
        return client

    async def open_policy(self) -> Policy:
        """Open the policy, whose index gets the engines' KV events at once."""
        block_tokens = self.workers.block_tokens
        if self.settings.mode == KV:
            self.cache_view = CacheView(self.clock, block_tokens=block_tokens)
            for worker in self._workers_by_id.values():
                self._follow_events(worker)
        return await open_policy(
            PolicyInputs(
                self.settings,
                self.client,
                self.events,
                self.clock,
                self.ledger,
                block_tokens=block_tokens,
                read_prompt=self._read_prompt,
                view=self.cache_view,
                prefill_client=self.prefill_client,
            )
        )

    def _follow_events(self, worker: ReplayWorker) -> None:
        if self.cache_view is not None:
            for name, engine in zip(worker.names, worker.ranks, strict=True):
                self.cache_view.apply(name, ())
                engine.on_kv_events(partial(self.cache_view.apply, name))

    def _read_prompt(self, request: GenerateRequest) -> Prompt:
        """Return the prompt for the router, which then reads what the workers have computed."""
        self.deliver_computed_tokens()
        return self._log.prompt_of(request)

    def report_links(self) -> None:
        """Report the rate of each link as learnt, because a trace is no test of learning it."""
        for worker in self._workers_by_id.values():
            self._report_link(worker)

    def _report_link(self, worker: ReplayWorker) -> None:
        if self.workers.transfer is not None:
            load = Load(transfer_bytes_per_s=self.workers.transfer)
            report = replace(load, ranks=(load,) * len(worker.ranks))
            self.policy.on_load_report(worker.id, report, self.clock.now())

    async def publish_loads(self) -> None:
        """Publish the workers' loads on the event plane, as workers of a deployment do."""
        self._publishes_loads = True
        for worker in self._workers_by_id.values():
            await self._publish_load(worker)

    async def _publish_load(self, worker: ReplayWorker) -> None:
        subject = f"{NAMESPACE}.{COMPONENT}{LOAD_METRICS_SUFFIX}"
        source = await self.events.open_source(subject, worker.id, latest=True)
        self.resources.push_async_callback(source.close)
        worker.load_publisher = LoadPublisher(worker.engine, source, self.clock)
        self._tasks.start(worker.load_publisher.run(), "load report")

    async def _dispatch(
        self, instance: Instance, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Send a request to the engine of `instance` (a `SendTo`)."""
        worker = self._workers_by_id[instance.id]
        worker.on_load_changed()
        await worker.engine.generate(request, context, reply)


def uses_load_reports(settings: RouterSettings, workers: ReplayWorkers) -> bool:
    """Whether the policy of a router reads load reports."""
    if settings.mode == KV:
        reported = settings.disaggregation.itl_slo or workers.tiers
        return bool(reported or make_cost(settings).uses_load_reports)
    return resolve_mode_alias(settings.mode) == ADAPTIVE


async def _open_clients(cluster: ReplayCluster) -> None:
    cluster.client = await cluster.open_client(decodes)
    cluster.prefill_client = await cluster.open_client(only_prefills)


async def _open_policy(cluster: ReplayCluster) -> None:
    cluster.policy = await cluster.open_policy()
    cluster.resources.push_async_callback(cluster.policy.close)
    cluster.report_links()
    if uses_load_reports(cluster.settings, cluster.workers):
        cluster.load_listeners.append(cluster.policy.on_load_report)


async def _open_loads(cluster: ReplayCluster) -> None:
    if len(cluster.load_listeners) > 1:  # others than the ledger
        await open_loads(cluster)
        await cluster.publish_loads()


async def _open_router(cluster: ReplayCluster) -> None:
    await open_router(cluster)
    operators: list[Operator] = [cluster.admission] if cluster.admits else []
    if cluster.migrates:
        limit = cluster.settings.migration_limit
        operators.append(Migration(cluster.clock, cluster.rng, cluster.metrics, limit=limit))
    cluster.send = chain(operators, cluster.router.send)


STAGES = (
    Stage("client", _open_clients, "finds the simulated workers"),
    Stage("ledger", open_ledger, "writes where each request is: placed, first token, end"),
    Stage("policy", _open_policy, "chooses a worker by router.mode"),
    Stage("admission", open_admission, "queues or rejects requests if there are limits"),
    Stage("loads", _open_loads, "passes the workers' load reports on if anyone reads them"),
    Stage("router", _open_router, "lets the policy choose and calls the engine"),
)
"""The stages of a replay, of those of `services/model_pipeline.py` that a simulation needs."""
