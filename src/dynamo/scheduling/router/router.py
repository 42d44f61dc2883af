"""Chooses an instance for every request and sends it there; chooses again where nobody was."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.policy import Policy
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

MAX_TRIES = 3

SendTo = Callable[[Instance, GenerateRequest, Context, Reply], Awaitable[None]]
"""`Send` with its destination: what stands behind the router."""


class Router:
    """The stage that turns a `Send` into a `SendTo`."""

    def __init__(self, policy: Policy, onward: SendTo, metrics: Registry | None = None) -> None:
        self._policy = policy
        self._onward = onward
        registry = metrics or Registry()
        self._routed = registry.counter(
            "dynamo_router_requests_total", "Requests for which a worker was chosen"
        )
        self._retried = registry.counter(
            "dynamo_router_retries_total", "Requests sent again because the worker was gone"
        )

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer by one instance. An instance that is gone did nothing, so another is tried, up to
        `MAX_TRIES` in all. Raises `NoWorkers`, and whatever the instance raised."""
        tried = set(context.avoid)
        last = len(tried) + MAX_TRIES
        while True:
            decision = await self._policy.choose(request, context, tried)
            self._routed.inc()
            try:
                return await self._onward(decision.instance, request, context, reply)
            except InstanceGone as error:
                tried.add(decision.instance.id)
                if len(tried) >= last:
                    raise
                log.warning(
                    "worker gone, choosing again",
                    extra={"fields": {"worker": decision.instance.id, "error": error.message}},
                )
            self._retried.inc()
            context = replace(context, attempt=context.attempt + 1)
