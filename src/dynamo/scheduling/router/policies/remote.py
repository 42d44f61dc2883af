"""Ask a router process for each decision; choose in this process while no router answers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import (
    DECODE_ERRORS,
    ModelNotReady,
    NotFound,
    NoWorkers,
    ProtocolError,
    WorkerFailed,
)
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.policies.remote_messages import (
    QUERY_ACCEPTED,
    RouteReply,
    decision_from_reply,
    decode_reply,
    encode_query,
)
from dynamo.scheduling.router.policy import BasicPolicy, Decision, Policy
from dynamo.scheduling.workers.prompt import Prompt, PromptReader
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 0.25
"""Time within which a router must accept a query; a later one is ejected for EJECTION_S."""
EJECTION_S = 2.0
MIN_LOG_INTERVAL_S = 0.5
"""Shortest time between two log lines about the availability of routers."""
FALLBACK_MODE = "least_loaded"
ROUTER_FAILURES = (
    WorkerFailed,
    NoWorkers,
    NotFound,
    ModelNotReady,
    ProtocolError,
    TimeoutError,
    *DECODE_ERRORS,
)
"""Failures of a router, not of the request: another router or the fallback may succeed."""


class RemotePolicy(Policy):
    """Query the routers behind `routers`, a client of the endpoint CHOOSE_ENDPOINT."""

    def __init__(
        self,
        client: Client,
        routers: Client,
        read_prompt: PromptReader,
        clock: Clock,
        *,
        block_tokens: int,
        metrics: Registry | None = None,
        prefill_client: Client | None = None,
    ) -> None:
        self._client = client
        self._prefill_client = prefill_client
        self._routers = routers
        self._read_prompt = read_prompt
        self._clock = clock
        self._block_tokens = block_tokens
        self._fallback = BasicPolicy(client, FALLBACK_MODE)
        self._ejected_until: dict[str, float] = {}
        self._responsive: set[str] = set()
        self._probing: set[str] = set()
        self._failing: set[str] = set()
        self._cache_views: dict[str, tuple[str, str]] = {}
        """Worker -> its instance, and how its cache was known."""
        self._router_available = True
        self._logged_at_s = -math.inf
        self._fallback_total = (metrics or Registry()).counter(
            "dynamo_router_unasked_total", "Requests routed locally because no router answered"
        )

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        prompt = self._read_prompt(request)
        decision = await self._query_routers(request, context, prompt, tried)
        self._log_availability(decision is not None)
        if decision is None:
            self._fallback_total.inc()
            decision = await self._fallback.choose(request, context, tried)
        cached_tokens = decision.overlap_blocks * self._block_tokens
        return replace(decision, prompt=prompt, new_tokens=max(1, prompt.tokens - cached_tokens))

    def router_states(self) -> dict[str, str]:
        """Return the state of each live router: "answers", "fails", "away" (did not accept a query
        in time) or "not asked yet"."""
        now = self._clock.now()
        return {name: self._router_state(name, now) for name in self._routers.instances}

    def cache_view_modes(self) -> dict[str, str]:
        """Return how each worker's cache was known when a router last chose it; empty while no
        router answers."""
        if "answers" not in self.router_states().values():
            return {}
        live = self._client.instances
        self._cache_views = {
            name: known for name, known in self._cache_views.items() if known[0] in live
        }
        return {name: view for name, (_, view) in self._cache_views.items()}

    async def close(self) -> None:
        await self._routers.close()

    async def _query_routers(
        self,
        request: GenerateRequest,
        context: Context,
        prompt: Prompt,
        tried: AbstractSet[str],
    ) -> Decision | None:
        """Return a router's decision; None if no router gives a usable one."""
        failed: set[str] = set()
        while candidates := self._available_routers() - failed:
            router = self._routers.pick("round_robin", candidates)
            query = encode_query(request, prompt, tuple(tried))
            try:
                reply = await self._query_router(router, query, context)
            except ROUTER_FAILURES as error:
                failed.add(router.id)
                if isinstance(error, TimeoutError):
                    self._ejected_until[router.id] = self._clock.now() + EJECTION_S
                self._on_router_failure(router.id, str(error))
                continue
            self._failing.discard(router.id)
            instance = self._client.instances.get(reply.instance)
            if instance is not None:
                decision = decision_from_reply(reply, instance, self._find_prefill(reply.prefill))
                if decision.view:
                    self._cache_views[decision.worker] = instance.id, decision.view
                return decision
            if reply.instance in tried:
                return None
            tried = {*tried, reply.instance}  # not live in this process
        return None

    def _find_prefill(self, instance_id: str) -> Instance | None:
        """Return the instance that a router chose for the prompt; None if it is not live here."""
        if not instance_id:
            return None
        instance = self._client.instances.get(instance_id)
        if instance is None and self._prefill_client is not None:
            instance = self._prefill_client.instances.get(instance_id)
        return instance

    def _available_routers(self) -> AbstractSet[str]:
        """Return the routers that may be queried. A router that has answered nothing yet gets one
        query at a time while there are others, since it may still be starting."""
        live: AbstractSet[str] = self._routers.instances.keys()
        if self._ejected_until:
            now = self._clock.now()
            self._ejected_until = {
                name: until for name, until in self._ejected_until.items() if until > now
            }
            live = live - self._ejected_until.keys()
        if self._probing and not self._responsive.isdisjoint(live):
            live = live - self._probing
        return live

    async def _query_router(self, router: Instance, payload: bytes, context: Context) -> RouteReply:
        if router.id in self._responsive:
            return await self._call_router(router, payload, context)
        self._probing.add(router.id)
        try:
            reply = await self._call_router(router, payload, context)
        finally:
            self._probing.discard(router.id)
        self._responsive &= self._routers.instances.keys()
        self._responsive.add(router.id)
        return reply

    async def _call_router(self, router: Instance, payload: bytes, context: Context) -> RouteReply:
        replies: list[bytes] = []
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S) as accept_timeout:

                def sink(item: bytes) -> bool:
                    if item == QUERY_ACCEPTED:
                        accept_timeout.reschedule(None)
                    else:
                        replies.append(item)
                    return True

                await self._routers.call(router, payload, context, sink)
        except TimeoutError:
            raise TimeoutError(
                f"router {router.id} did not answer in {ACCEPT_TIMEOUT_S} s"
            ) from None
        if not replies:
            raise WorkerFailed(f"router {router.id} ended without an answer")
        return decode_reply(replies[0])

    def _router_state(self, router: str, now: float) -> str:
        if self._ejected_until.get(router, now) > now:
            return "away"
        if router in self._failing:
            return "fails"
        return "answers" if router in self._responsive else "not asked yet"

    def _on_router_failure(self, router: str, error: str) -> None:
        """Log the first failure of a router until it answers again."""
        if router not in self._failing:
            self._failing.add(router)
            fields = {"router": router, "error": error}
            log.warning("router failed to choose a worker", extra={"fields": fields})

    def _log_availability(self, available: bool) -> None:
        now = self._clock.now()
        if available == self._router_available or now - self._logged_at_s < MIN_LOG_INTERVAL_S:
            return
        self._router_available, self._logged_at_s = available, now
        if available:
            log.info("a router answers again")
        else:
            log.warning("no router answers: choosing workers in this process")
