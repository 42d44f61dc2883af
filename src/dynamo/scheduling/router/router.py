"""Chooses an instance for every request and sends it there; chooses again where nobody was."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, InstanceGone
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.policy import Decision, Observer, Policy, Ticket
from dynamo.scheduling.router.tracked import TrackedReply
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

MAX_TRIES = 3

SendTo = Callable[[Instance, GenerateRequest, Context, Reply], Awaitable[None]]
"""`Send` with its destination: what stands behind the router."""


class Router:
    """The stage that turns a `Send` into a `SendTo`."""

    def __init__(
        self,
        policy: Policy,
        onward: SendTo,
        metrics: Registry | None = None,
        *,
        clock: Clock | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.policy = policy
        self._onward = onward
        self._clock = clock or SystemClock()
        self._observers = tuple(observers)
        registry = metrics or Registry()
        self._routed = registry.counter(
            "dynamo_router_requests_total", "Requests for which a worker was chosen"
        )
        self._retried = registry.counter(
            "dynamo_router_retries_total", "Requests sent again because the worker was gone"
        )

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Answer by one instance, none of those that the context says to avoid. An instance that is
        gone did nothing, so another is tried, up to `MAX_TRIES` in all. Raises `NoWorkers`, and
        whatever the instance raised."""
        tried = set(context.avoid)
        last = len(tried) + MAX_TRIES
        while True:
            decision = await self.policy.choose(request, context, tried)
            self._routed.inc()
            try:
                return await self._follow(decision, request, context, reply)
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

    async def _follow(
        self, decision: Decision, request: GenerateRequest, context: Context, reply: Reply
    ) -> None:
        """Send it there; whoever wants to know hears how it went."""
        onward = self._onward
        asked = request if decision.rank is None else replace(request, rank=decision.rank)
        ticket, observers = decision.ticket, self._observers
        if ticket is None and not observers:
            return await onward(decision.instance, asked, context, reply)
        ticket = ticket or Ticket()
        tracked = TrackedReply(reply, ticket, self._clock)
        for observer in observers:
            observer.decided(request, decision)
        error = ""
        try:
            await onward(decision.instance, asked, context, tracked)
        except DynamoError as failure:
            error = failure.code
            raise
        except CancelledError:
            error = "cancelled"
            raise
        finally:
            ticket.end()
            if observers:
                outcome = tracked.outcome(len(request.token_ids) // TOKEN_BYTES, error)
                for observer in observers:
                    observer.ended(request, decision, outcome)
