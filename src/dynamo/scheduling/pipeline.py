"""Chaining of token operators; `services/model_pipeline.py` lists the stages of a model."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.settings import Settings
from dynamo.core.values import GenerateRequest
from dynamo.models.card import ModelCard
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
