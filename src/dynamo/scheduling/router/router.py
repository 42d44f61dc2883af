"""The pipeline stage that sends each request to a chosen instance, and retries gone instances."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, Unsupported
from dynamo.core.features import required_features
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import Reply
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.attempt import Attempt, Observer, RankBalancer
from dynamo.scheduling.router.features import FeatureFilter
from dynamo.scheduling.router.policy import Decision, Policy, no_workers_error
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.scheduling.workers.workers import NO_RANKS, data_parallel_ranks
from dynamo.telemetry import Registry
from dynamo.telemetry.story import current_story

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3

SendTo = Callable[[Instance, GenerateRequest, Context, Reply], Awaitable[None]]
"""Like `SendRequest`, with the destination instance as the first argument."""


class WorkerRouter:
    """Send each request to the instance that `policy` chooses, by a `SendTo`. The router itself
    chooses the data-parallel rank if the policy does not, and enters the attempt in `ledger` if the
    policy has not. Requests that need a feature go only to instances of `client` that have it."""

    def __init__(
        self,
        policy: Policy,
        onward: SendTo,
        metrics: Registry | None = None,
        *,
        clock: Clock | None = None,
        client: Client | None = None,
        prefill_client: Client | None = None,
        observers: Sequence[Observer] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self.policy = policy
        self._onward = onward
        self._clock = clock or SystemClock()
        self._client = client
        self._feature_filter = FeatureFilter()
        self._prefill_client = prefill_client
        self.ledger = ledger or Ledger(self._clock)
        self._ranks = RankBalancer(self.ledger.workers)
        self._has_ranks = True
        for source in (client, prefill_client):
            if source is not None:
                source.on_change(self._on_instances_changed)
        self._on_instances_changed()
        self._observers = tuple(observers)
        registry = metrics or Registry()
        self._routed = registry.counter(
            "dynamo_router_requests_total", "Requests for which a worker was chosen"
        )
        self._remote_prefills = registry.counter(
            "dynamo_router_remote_prefills_total",
            "Requests whose prompt another worker than the one that answers was to compute",
        )
        self._retried = registry.counter(
            "dynamo_router_retries_total", "Requests sent again because the worker was gone"
        )

    async def send(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        """Send the request to one instance that is not in `context.avoid`. A gone instance did no
        work, so another one is tried, up to MAX_ATTEMPTS in all. Raises `NoWorkers`, `Unsupported`
        if the request needs what no instance can do, and the errors of the instance."""
        tried = set(context.avoid)
        # Few requests need a feature that not every engine has.
        if (
            request.top_logprobs is not None
            or request.prompt_logprobs is not None
            or request.structured is not None
            or request.adapter
            or request.extra
            or request.sampling.logit_bias
        ):
            tried |= self._workers_unable_for(request, context)
        last = len(tried) + MAX_ATTEMPTS
        while True:
            choosing_s = self._clock.now()
            decision = await self.policy.choose(request, context, tried)
            self._routed.inc()
            if self._has_ranks and (decision.rank is None or decision.prefill is not None):
                decision = self._choose_ranks(decision, tried)
            sent = request if decision.rank is None else replace(request, rank=decision.rank)
            if decision.prefill is not None:
                sent = replace(sent, prefill=decision.prefill_worker)
                self._remote_prefills.inc()
            if decision.itl_slo_ms:
                sent = replace(sent, itl_slo_ms=decision.itl_slo_ms)
            if context.avoid:  # not needed any more, and may be long
                context = replace(context, avoid=())
            attempt = self._start_attempt(decision, sent, context, reply, choosing_s)
            error: BaseException | None = None
            try:
                return await self._onward(decision.instance, sent, context, attempt)
            except InstanceGone as gone:
                error = gone
                tried.add(decision.instance.id)
                if len(tried) >= last:
                    raise
                fields = {"worker": decision.instance.id, "error": gone.message}
                log.warning("worker gone, choosing again", extra={"fields": fields})
            except BaseException as failure:
                error = failure
                raise
            finally:
                attempt.end(error, self._observers)
                del error  # its traceback refers to this frame
            self._retried.inc()
            context = replace(context, attempt=context.attempt + 1)

    def _workers_unable_for(self, request: GenerateRequest, context: Context) -> frozenset[str]:
        """Return the workers that lack what the request needs. If all do, raises `Unsupported`, or
        `NoWorkers` for a retried request, because a worker that could answer has left. A structured
        output that began elsewhere may have begun at an engine that cannot continue in it: then
        none is awaited.
        """
        if self._client is None:
            return frozenset()
        try:
            required: Sequence[str] = required_features(request)
            if request.adapter:
                required = (*required, request.adapter)
            return self._feature_filter.workers_without(self._client.instances, required)
        except Unsupported:
            structured = request.structured if request.resumed else None
            if context.attempt and (structured is None or structured.kind in ("text", "calls")):
                raise no_workers_error(self._client) from None
            raise

    def _on_instances_changed(self) -> None:
        clients = (self._client, self._prefill_client)
        self._has_ranks = self._client is None or any(
            data_parallel_ranks(instance) is not NO_RANKS
            for client in clients
            if client is not None
            for instance in client.instances.values()
        )
        if self._client is not None:
            instances = [client.instances for client in clients if client is not None]
            self._ranks.retain({name for each in instances for name in each})

    def _choose_ranks(self, decision: Decision, tried: AbstractSet[str]) -> Decision:
        """Choose the ranks where the policy has chosen instances only."""
        choose = self._ranks.choose
        if decision.rank is None and (rank := choose(decision.instance, tried)) is not None:
            decision = replace(decision, rank=rank)
        prefill = decision.prefill
        if prefill is None or decision.prefill_rank is not None:
            return decision
        return replace(decision, prefill_rank=choose(prefill, tried))

    def _start_attempt(
        self,
        decision: Decision,
        request: GenerateRequest,
        context: Context,
        reply: Reply,
        choosing_s: float,
    ) -> Attempt:
        """Enter the attempt, notify story and observers, and wrap `reply` in an Attempt."""
        prefill = decision.prefill
        if (placed := decision.placement) is None:
            workers, prompt = self.ledger.workers, decision.prompt
            if prompt is None:
                prompt = Prompt(len(request.token_ids) // TOKEN_BYTES, ())
            placed = self.ledger.place(
                f"{context.request_id}/{request.choice}/{context.attempt}",
                workers.at(decision.instance, decision.rank),
                prompt,
                None if prefill is None else workers.at(prefill, decision.prefill_rank),
                new_tokens=decision.new_tokens or prompt.tokens,
                max_tokens=request.stops.max_tokens,
            )
        name = "" if prefill is None else prefill.id
        attempt = Attempt(reply, placed, self.ledger, name, decision)
        attempt.choice, attempt.resumed = request.choice, request.resumed
        attempt.choosing_s = choosing_s
        if (story := current_story.get()) is not None:
            story.attempts.append(attempt)
        for observer in self._observers:
            observer.on_attempt_started(attempt)
        if prefill is None:
            return attempt
        if self._prefill_client is not None and self._prefill_client.on_instance_busy is not None:
            self._prefill_client.on_instance_busy()
        return attempt
