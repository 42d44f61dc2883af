"""The pipeline of token operators as a list, so that the order of things is data."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.context import Context
from dynamo.core.reply import Operator, Reply, Send
from dynamo.core.values import GenerateRequest
from dynamo.runtime.client import Client
from dynamo.scheduling.dispatch import Dispatch
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.router import BasicPolicy, Router
from dynamo.telemetry import Registry


class Pipeline:
    """A request passes the operators in order and then `last`."""

    def __init__(self, operators: Sequence[Operator], last: Send) -> None:
        send = last
        for operator in reversed(operators):
            send = _through(operator, send)
        self._first = send

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """A `Send`."""
        await self._first(request, context, reply)


def assemble(operators: Sequence[Operator], last: Send) -> Send:
    """The pipeline of `operators`, in order, ending in `last`."""
    return Pipeline(operators, last).send


def standard_pipeline(
    client: Client,
    mode: str,
    metrics: Registry | None = None,
    *,
    clock: Clock | None = None,
    migration_limit: int = 16,
) -> Send:
    """What a frontend sends by: migration, the router in `mode`, ending in dispatch to one of
    `client`'s instances. Raises ConfigError for an unknown mode."""
    migration = Migration(clock or SystemClock(), client.rng, metrics, limit=migration_limit)
    operators: list[Operator] = [migration]
    router = Router(BasicPolicy(client, mode), Dispatch(client).send, metrics)
    return assemble(operators, router.send)


def _through(operator: Operator, onward: Send) -> Send:
    def send(request: GenerateRequest, context: Context, reply: Reply) -> Awaitable[None]:
        return operator.send(request, context, reply, onward)

    return send
