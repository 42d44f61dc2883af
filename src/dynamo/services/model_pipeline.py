"""The pipeline of one model: every stage between its text processor and its workers.

A request passes the stages of `REQUEST_ORDER`::

    processor ─▶ admission ─▶ migration ─▶ router ─▶ dispatch ─▶ client ─▶ worker
                                             │
                                           policy ◀── load reports, KV events

`STAGES` lists all stages in the order in which they are opened. Each row opens one stage, which may
use the stages above it, and registers how that stage is closed. Closing runs in reverse order.
Operators of entry points stand before, between or after admission and migration (`operator_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from dynamo.core.errors import ConfigError
from dynamo.core.plugins import OPERATORS
from dynamo.core.reply import Operator
from dynamo.models.card import ModelCard
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.sleep import SLEEP_ENDPOINT, sleep_level
from dynamo.scheduling.admission import WorkerStarts
from dynamo.scheduling.admission.sleeping_workers import SleepingWorkers
from dynamo.scheduling.dispatch import Dispatch
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.pipeline import (
    OperatorInputs,
    Stage,
    StagedPipeline,
    chain,
    open_admission,
    open_ledger,
    open_loads,
    open_router,
)
from dynamo.scheduling.router import Policy
from dynamo.scheduling.router.factory import KV, open_policy
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.policies.remote import RemotePolicy
from dynamo.scheduling.router.policies.remote_messages import CHOOSE_ENDPOINT, read_query_prompt
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.worker_health import WorkerHealth
from dynamo.scheduling.workers.prompt import make_prompt_reader
from dynamo.sdk.decorators import spec_of
from dynamo.services.cache_views import open_cache_view
from dynamo.services.catalogue import CardCompatibility
from dynamo.services.components import Router
from dynamo.services.routing import ModelRouting, ProcessRouting

WORKER_COMPONENT = "worker"


class ModelPipeline(StagedPipeline):
    """The open stages of one model; each row of `STAGES` sets the attribute of its name.

    `failure_detector` is None in a router's own process, which chooses workers and sends no
    requests (`sends_requests` is False).
    """

    health: WorkerHealth
    sleeping: SleepingWorkers
    starts: WorkerStarts
    migration: Migration
    dispatch: Dispatch

    def __init__(
        self,
        runtime: DistributedRuntime,
        routing: ProcessRouting,
        card: ModelCard,
        failure_detector: FailureDetector | None = None,
    ) -> None:
        super().__init__(runtime.settings.router, runtime.clock, routing.metrics_of(card.name))
        self.runtime = runtime
        self.events = runtime.events
        self.routing = routing
        self.card = card
        self.model = card.name
        self.failure_detector = failure_detector
        self.sends_requests = failure_detector is not None

    @property
    def routing_subject(self) -> str:
        """The event subject on which the routers of this model publish the requests they send."""
        namespace = self.runtime.settings.runtime.namespace
        return f"{namespace}.router/{quote(self.card.name, safe='')}"

    async def open(self, stages: Sequence[Stage]) -> None:
        """Open `stages` in order and register the model for explanations. Raises `ConfigError`."""
        await super().open(stages)
        self.routing.add_model(
            self.card.name, ModelRouting(self.client, self.policy, self.loads, self.cache_view)
        )


async def _open_client(pipeline: ModelPipeline) -> None:
    accepts = CardCompatibility(pipeline.card).accepts
    endpoint = pipeline.runtime.namespace().component(WORKER_COMPONENT).endpoint("generate")
    pipeline.client = await endpoint.client(
        lambda instance: decodes(instance) and accepts(instance), verify=pipeline.sends_requests
    )
    pipeline.resources.push_async_callback(pipeline.client.close)
    pipeline.prefill_client = await endpoint.client(
        lambda instance: only_prefills(instance) and accepts(instance),
        verify=pipeline.sends_requests,
    )
    pipeline.resources.push_async_callback(pipeline.prefill_client.close)


async def _open_health(pipeline: ModelPipeline) -> None:
    runtime, client = pipeline.runtime, pipeline.client
    if pipeline.failure_detector is not None:
        watch = pipeline.failure_detector.watch
        metrics = pipeline.metrics
        pipeline.resources.callback(watch(client, metrics))
        pipeline.resources.callback(watch(pipeline.prefill_client, metrics, spares_last=False))
    pipeline.health = WorkerHealth(
        client,
        pipeline.ledger,
        runtime.clock,
        runtime.rng,
        pipeline.metrics,
        interval_s=pipeline.settings.load_balancing.health_check_interval,
        threshold=pipeline.settings.load_balancing.unhealthy_threshold,
    )
    pipeline.resources.push_async_callback(pipeline.health.close)


async def _open_policy(pipeline: ModelPipeline) -> None:
    settings = pipeline.settings
    asks_routers = pipeline.sends_requests and settings.mode == KV and settings.replicas > 0
    policy = await (_remote_policy if asks_routers else _local_policy)(pipeline)
    pipeline.policy = policy
    pipeline.resources.push_async_callback(policy.close)
    pipeline.resources.callback(
        pipeline.runtime.on_settings_change(lambda new: policy.update_settings(new.router))
    )
    pipeline.load_listeners.append(policy.on_load_report)
    if settings.mode == KV:
        await _open_replica_sync(pipeline, apply=not asks_routers)


async def _local_policy(pipeline: ModelPipeline) -> Policy:
    """Choose in this process. Queries of frontends carry block hashes instead of tokens."""
    runtime, block_tokens = pipeline.runtime, pipeline.card.block_tokens
    if pipeline.settings.mode == KV:
        component = pipeline.worker_component
        pipeline.cache_view = await open_cache_view(
            runtime, block_tokens, component, pipeline.model
        )
    return await open_policy(
        PolicyInputs(
            pipeline.settings,
            pipeline.client,
            runtime.events,
            runtime.clock,
            pipeline.ledger,
            block_tokens=block_tokens,
            read_prompt=None if pipeline.sends_requests else read_query_prompt,
            view=pipeline.cache_view,
            prefill_client=pipeline.prefill_client,
        )
    )


async def _remote_policy(pipeline: ModelPipeline) -> Policy:
    """Ask the router processes of this namespace (`router.replicas`)."""
    runtime, block_tokens = pipeline.runtime, pipeline.card.block_tokens
    component = runtime.namespace().component(spec_of(Router).name)
    return RemotePolicy(
        pipeline.client,
        await component.endpoint(CHOOSE_ENDPOINT).client(),
        make_prompt_reader(block_tokens),
        runtime.clock,
        block_tokens=block_tokens,
        metrics=pipeline.metrics,
        prefill_client=pipeline.prefill_client,
    )


async def _open_replica_sync(pipeline: ModelPipeline, *, apply: bool) -> None:
    """Share placed requests with the other routers. A router's own process publishes none, because
    the frontends publish what they send."""
    runtime, publish = pipeline.runtime, pipeline.sends_requests
    replica_sync = ReplicaSync(
        runtime.clock, runtime.instance_id, pipeline.ledger, publish=publish, apply=apply
    )
    pipeline.resources.push_async_callback(replica_sync.close)
    await replica_sync.start(runtime.events, pipeline.routing_subject)


async def _open_starts(pipeline: ModelPipeline) -> None:
    runtime, routing, model = pipeline.runtime, pipeline.routing, pipeline.model
    accepts = CardCompatibility(pipeline.card).accepts
    endpoint = runtime.namespace().component(WORKER_COMPONENT).endpoint(SLEEP_ENDPOINT)
    sleepers = await endpoint.client(
        lambda instance: sleep_level(instance) > 0 and decodes(instance) and accepts(instance)
    )
    pipeline.resources.push_async_callback(sleepers.close)
    pipeline.sleeping = SleepingWorkers(pipeline.client, sleepers)
    pipeline.resources.push_async_callback(pipeline.sleeping.close)
    pipeline.starts = WorkerStarts(
        pipeline.client,
        routing.follow_supervisors(),
        runtime.clock,
        pipeline.sleeping,
        lambda: routing.predict_load(model),
    )
    pipeline.resources.callback(pipeline.starts.close)


async def _open_admission(pipeline: ModelPipeline) -> None:
    await open_admission(pipeline, pipeline.starts)
    admission = pipeline.admission
    pipeline.resources.callback(
        pipeline.runtime.on_settings_change(lambda new: admission.update(new.router))
    )


async def _open_migration(pipeline: ModelPipeline) -> None:
    runtime, limit = pipeline.runtime, pipeline.settings.migration_limit
    pipeline.migration = Migration(
        runtime.clock, pipeline.client.rng, pipeline.metrics, limit=limit
    )


async def _open_dispatch(pipeline: ModelPipeline) -> None:
    pipeline.dispatch = Dispatch(pipeline.client)
    pipeline.dispatch_to = pipeline.dispatch.send


async def _open_router(pipeline: ModelPipeline) -> None:
    routing = pipeline.routing
    counts = routing.counts_decisions
    pipeline.observers = [routing.decision_metrics_of(pipeline.model)] if counts else []
    await open_router(pipeline)
    operators = [
        getattr(pipeline, name) if name in OPERATORS.builtin else await _open_own(pipeline, name)
        for name in operator_order(pipeline.settings.operators)
    ]
    pipeline.send = chain(operators, pipeline.router.send)


def operator_order(listed: Sequence[str]) -> Sequence[str]:
    """Return all token operators in the order in which a request passes them: those of the setting
    `router.operators`, then the built-in ones that it does not list."""
    return (*listed, *(name for name in OPERATORS.builtin if name not in listed))


async def _open_own(pipeline: ModelPipeline, name: str) -> Operator:
    """Open the operator of an entry point. Raises `ConfigError`."""
    runtime = pipeline.runtime
    inputs = OperatorInputs(
        runtime.settings, pipeline.card, runtime.clock, pipeline.metrics, pipeline.resources
    )
    operator = await OPERATORS.load(name)(inputs)
    if not isinstance(operator, Operator):
        raise ConfigError(
            f"token operator {name!r} is a {type(operator).__name__} and no Operator",
            hint="its entry point must name an async function that returns an Operator",
        )
    return operator


STAGES = (
    Stage("client", _open_client, "finds workers that agree with the model's card, and connects"),
    Stage("ledger", open_ledger, "writes where each request is: placed, first token, end"),
    Stage("health", _open_health, "detects dead hosts, probes workers, ejects and readmits them"),
    Stage("policy", _open_policy, "chooses a worker by router.mode, here or in router processes"),
    Stage(
        "starts",
        _open_starts,
        "predicts when a lost worker will have started; wakes a sleeping one",
    ),
    Stage("admission", _open_admission, "queues or rejects requests by SLO and worker capacity"),
    Stage("loads", open_loads, "passes the workers' load reports to policy and admission"),
    Stage("migration", _open_migration, "continues an answer on another worker after a failure"),
    Stage("dispatch", _open_dispatch, "sends one request to one worker and decodes its answer"),
    Stage("router", _open_router, "lets the policy choose and dispatches, again if a worker left"),
)
"""All stages of a frontend's pipeline in the order in which they are opened."""

ROUTER_PROCESS_STAGES = tuple(
    row for row in STAGES if row.name in ("client", "ledger", "policy", "loads")
)
"""The stages of a router's own process, which chooses workers and sends no requests."""

REQUEST_ORDER = (*operator_order(()), "router", "dispatch")
"""All stages that a request passes, without operators of entry points. `router` turns a
`SendRequest` into a `SendTo`."""


async def open_model_pipeline(
    runtime: DistributedRuntime,
    failure_detector: FailureDetector,
    routing: ProcessRouting,
    card: ModelCard,
) -> ModelPipeline:
    """Open the pipeline to the workers that serve the card's model. Raises `ConfigError`."""
    pipeline = ModelPipeline(runtime, routing, card, failure_detector)
    await pipeline.open(STAGES)
    pipeline.health.start()
    return pipeline


async def open_router_process_pipeline(
    runtime: DistributedRuntime, routing: ProcessRouting, card: ModelCard
) -> ModelPipeline:
    """Open the stages that choose among the workers of the card's model. Raises `ConfigError`."""
    pipeline = ModelPipeline(runtime, routing, card)
    await pipeline.open(ROUTER_PROCESS_STAGES)
    return pipeline
