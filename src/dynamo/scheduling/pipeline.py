"""The pipeline of token operators as a list, so that the order of things is data."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.context import Context
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.admission import Admission
from dynamo.scheduling.dispatch import Dispatch
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.router import BasicPolicy, Observer, Policy, WorkerRouter
from dynamo.scheduling.worker_health import WorkerHealth
from dynamo.telemetry import Registry


def assemble(operators: Sequence[Operator], last: SendRequest) -> SendRequest:
    """A request passes the operators in order and then `last`."""
    send = last
    for operator in reversed(operators):
        send = _bind(operator, send)
    return send


def standard_pipeline(
    client: Client,
    policy: Policy | str,
    metrics: Registry | None = None,
    *,
    clock: Clock | None = None,
    migration_limit: int = 16,
    health: WorkerHealth | None = None,
    admission: Admission | None = None,
    observers: Sequence[Observer] = (),
) -> SendRequest:
    """What a frontend sends by: admission, migration, the router by `policy` (or a basic mode's
    name), ending in dispatch to one of `client`'s instances. Raises ConfigError for an unknown
    mode."""
    clock = clock or SystemClock()
    migration = Migration(clock, client.rng, metrics, limit=migration_limit)
    operators: list[Operator] = [migration] if admission is None else [admission, migration]
    chosen = BasicPolicy(client, policy) if isinstance(policy, str) else policy
    router = WorkerRouter(
        chosen,
        Dispatch(client).send,
        metrics,
        clock=clock,
        observers=observers,
        listener_factories=[tracker.track_attempt for tracker in (health, admission) if tracker],
    )
    return assemble(operators, router.send)


def _bind(operator: Operator, call_next: SendRequest) -> SendRequest:
    def send(request: GenerateRequest, context: Context, reply: Reply) -> Awaitable[None]:
        return operator.send(request, context, reply, call_next)

    return send
