"""Chaining of token operators; `services/model_pipeline.py` lists the stages of a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec

from dynamo.communication.events import Events
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest
from dynamo.models.card import ModelCard
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.admission import Admission, WorkerStarts
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router import Observer, Policy, WorkerRouter
from dynamo.scheduling.router.router import SendTo
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadListener, LoadView
from dynamo.telemetry import Registry


class OperatorInputs(msgspec.Struct, frozen=True):
    """The arguments of the factory of an operator. `resources` close with the model's pipeline."""

    settings: Settings
    card: ModelCard
    clock: Clock
    metrics: Registry
    resources: AsyncExitStack


def chain(operators: Sequence[Operator], last: SendRequest) -> SendRequest:
    """Return a function that sends a request through `operators` in order and then to `last`."""
    send = last
    for operator in reversed(operators):
        send = _bind(operator, send)
    return send


def _bind(operator: Operator, call_next: SendRequest) -> SendRequest:
    def send(request: GenerateRequest, context: Context, reply: Reply) -> Awaitable[None]:
        return operator.send(request, context, reply, call_next)

    return send


class Stage(NamedTuple):
    """A row of a table: the attribute that `open` sets, and the purpose of the stage."""

    name: str
    open: Callable[[Any], Awaitable[None]]
    purpose: str


class StagedPipeline:
    """The open stages of one model; each row of the table sets the attribute of its name.

    `dispatch_to` sends a request to an instance, `send` passes one through all stages.
    """

    client: Client
    prefill_client: Client
    ledger: Ledger
    policy: Policy
    admission: Admission
    loads: LoadView
    router: WorkerRouter
    dispatch_to: SendTo
    send: SendRequest
    cache_view: CacheView | None = None
    """The index of the caches in mode kv, if this process has one."""
    observers: Sequence[Observer] = ()
    model: str = ""
    """The model whose workers' events are followed; "" for those of all."""

    def __init__(self, settings: RouterSettings, clock: Clock, metrics: Registry) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = metrics
        self.resources = AsyncExitStack()
        self.load_listeners: list[LoadListener] = []
        self.events: Events

    @property
    def worker_component(self) -> str:
        """The workers' "namespace.component", under which their events are published."""
        return self.client.path.rsplit(".", 1)[0]

    async def open(self, stages: Sequence[Stage]) -> None:
        """Open `stages` in order. Raises `ConfigError`."""
        try:
            for stage in stages:
                await stage.open(self)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all stages, the last one first. Requests in flight are not interrupted."""
        await self.resources.aclose()


async def open_ledger(pipeline: StagedPipeline) -> None:
    """Open the ledger, which follows the load reports."""
    pipeline.ledger = Ledger(pipeline.clock, pipeline.client, pipeline.prefill_client)
    pipeline.resources.callback(pipeline.ledger.close)
    pipeline.load_listeners.append(pipeline.ledger.on_load_report)


async def open_admission(pipeline: StagedPipeline, starts: WorkerStarts | None = None) -> None:
    """Open admission with the limits of the settings."""
    pipeline.admission = admission = Admission(
        pipeline.client,
        pipeline.ledger,
        pipeline.policy,
        pipeline.clock,
        pipeline.settings,
        pipeline.metrics,
        starts,
        pipeline.prefill_client,
    )
    pipeline.resources.callback(admission.close)
    pipeline.load_listeners.append(admission.on_load_report)


async def open_loads(pipeline: StagedPipeline) -> None:
    """Pass the workers' load reports to the listeners."""
    pipeline.loads = loads = LoadView(pipeline.clock)
    for listener in pipeline.load_listeners:
        loads.add_listener(listener)
    pipeline.resources.callback(loads.close)
    for client in (pipeline.client, pipeline.prefill_client):
        pipeline.resources.callback(_repeat_loads_of_new(client, loads))
    await loads.subscribe(pipeline.events, pipeline.worker_component, pipeline.model)


def _repeat_loads_of_new(client: Client, loads: LoadView) -> Callable[[], None]:
    """Repeat the last report of each worker that the client begins to use. Returns a function that
    ends this."""
    known = client.instances

    def repeat() -> None:
        nonlocal known
        before, known = known, client.instances
        loads.repeat(known.keys() - before.keys())

    return client.on_change(repeat)


async def open_router(pipeline: StagedPipeline) -> None:
    """Open the router above `dispatch_to`."""
    pipeline.router = WorkerRouter(
        pipeline.policy,
        pipeline.dispatch_to,
        pipeline.metrics,
        clock=pipeline.clock,
        client=pipeline.client,
        prefill_client=pipeline.prefill_client,
        observers=pipeline.observers,
        ledger=pipeline.ledger,
    )
