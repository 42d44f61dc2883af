"""Asks a router of its own which instance gets a request; picks by itself while none answers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Set as AbstractSet

import msgspec
from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import ModelNotReady, NotFound, NoWorkers, ProtocolError, WorkerFailed
from dynamo.core.values import GenerateRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.placement_handle import Placement
from dynamo.scheduling.router.policies.remote_messages import (
    QUERY_ACCEPTED,
    RouteReply,
    decode_reply,
    encode_query,
)
from dynamo.scheduling.router.policy import BasicPolicy, Decision, Policy
from dynamo.scheduling.router.prompt import Prompt, PromptReader
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 0.25
"""A router that has not even taken a question by then is asked no more for `AWAY_S`."""
EJECTION_S = 2.0
MIN_LOG_INTERVAL_S = 0.5
"""Whether a router answers is told no more often."""
FALLBACK_MODE = "least_loaded"
ROUTER_FAILURES = (
    WorkerFailed,
    NoWorkers,
    NotFound,
    ModelNotReady,
    ProtocolError,
    TimeoutError,
    msgspec.DecodeError,
)
"""What says nothing of the request: another router, or none, may do better."""


class RemotePolicy(Policy):
    """`routers`: a client of the endpoint `choose`; `replicas`: tells all routers what goes out,
    so that they know of it whoever chose, and forget it when this process dies."""

    def __init__(
        self,
        client: Client,
        routers: Client,
        replicas: ReplicaSync,
        read_prompt: PromptReader,
        clock: Clock,
        *,
        block_tokens: int,
        metrics: Registry | None = None,
    ) -> None:
        self._client = client
        self._routers = routers
        self._replica_sync = replicas
        self._read_prompt = read_prompt
        self._clock = clock
        self._block_tokens = block_tokens
        self._fallback = BasicPolicy(client, FALLBACK_MODE)
        self._ejected_until: dict[str, float] = {}
        self._responsive: set[str] = set()
        self._probing: set[str] = set()
        self._failing: set[str] = set()
        self._cache_views: dict[str, str] = {}
        self._router_available = True
        self._logged_at_s = -math.inf
        self._fallback_total = (metrics or Registry()).counter(
            "dynamo_router_unasked_total", "Requests routed without the router, which was away"
        )

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        prompt = self._read_prompt(request)
        made = await self._query_routers(request, context, prompt, tried)
        self._log_availability(made is not None)
        if made is None:
            self._fallback_total.inc()
            made = await self._fallback.choose(request, context, tried)
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        overlap = made.overlap_blocks * self._block_tokens
        new_tokens = max(1, prompt.tokens - overlap)
        ticket = RemotePlacement(name, prompt, new_tokens, self._replica_sync, self._clock)
        self._replica_sync.publish_routed(made.worker, ticket)
        return replace(made, placement=ticket)

    def router_states(self) -> dict[str, str]:
        """Each router that is there: "answers", "fails", "away" (took no question in time), or "not
        asked yet"."""
        now = self._clock.now()
        return {name: self._router_state(name, now) for name in self._routers.instances}

    def cache_view_modes(self) -> dict[str, str]:
        """How each worker's cache was known when a router last chose it; empty while none
        answers."""
        if "answers" not in self.router_states().values():
            return {}
        live = self._client.instances
        self._cache_views = {
            name: view for name, view in self._cache_views.items() if name.partition("/")[0] in live
        }
        return dict(self._cache_views)

    async def close(self) -> None:
        await self._replica_sync.close()
        await self._routers.close()

    async def _query_routers(
        self,
        request: GenerateRequest,
        context: Context,
        prompt: Prompt,
        tried: AbstractSet[str],
    ) -> Decision | None:
        """What a router says; None where none can say."""
        failed: set[str] = set()
        while candidates := self._available_routers() - failed:
            router = self._routers.pick("round_robin", candidates)
            ask = encode_query(request, prompt, tuple(tried))
            try:
                answer = await self._query_router(router, ask, context)
            except ROUTER_FAILURES as error:
                failed.add(router.id)
                if isinstance(error, TimeoutError):
                    self._ejected_until[router.id] = self._clock.now() + EJECTION_S
                self._on_router_failure(router.id, str(error))
                continue
            self._failing.discard(router.id)
            instance = self._client.instances.get(answer.instance)
            if instance is not None:
                made = _decision(instance, answer)
                if made.view:
                    self._cache_views[made.worker] = made.view
                return made
            if answer.instance in tried:
                return None
            tried = {*tried, answer.instance}  # not known here, or withheld
        return None

    def _available_routers(self) -> AbstractSet[str]:
        """Routers that may be asked. One that has answered nothing yet gets one question, as long
        as there are others: it may still be busy with its start."""
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
            answer = await self._call_router(router, payload, context)
        finally:
            self._probing.discard(router.id)
        self._responsive &= self._routers.instances.keys()
        self._responsive.add(router.id)
        return answer

    async def _call_router(self, router: Instance, payload: bytes, context: Context) -> RouteReply:
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S) as patience:

                def sink(item: bytes) -> bool:
                    if item == QUERY_ACCEPTED:
                        patience.reschedule(None)
                    else:
                        answers.append(item)
                    return True

                await self._routers.call(router, payload, context, sink)
        except TimeoutError:
            raise TimeoutError(
                f"router {router.id} did not answer in {ACCEPT_TIMEOUT_S} s"
            ) from None
        if not answers:
            raise WorkerFailed(f"router {router.id} ended without an answer")
        return decode_reply(answers[0])

    def _router_state(self, router: str, now: float) -> str:
        if self._ejected_until.get(router, now) > now:
            return "away"
        if router in self._failing:
            return "fails"
        return "answers" if router in self._responsive else "not asked yet"

    def _on_router_failure(self, router: str, error: str) -> None:
        """Told once until it answers again, however many requests hear of it."""
        if router not in self._failing:
            self._failing.add(router)
            fields = {"router": router, "error": error}
            log.warning("a router cannot say", extra={"fields": fields})

    def _log_availability(self, asked: bool) -> None:
        now = self._clock.now()
        if asked == self._router_available or now - self._logged_at_s < MIN_LOG_INTERVAL_S:
            return
        self._router_available, self._logged_at_s = asked, now
        if asked:
            log.info("the router answers again")
        else:
            log.warning("no router: picking alone")


class RemotePlacement(Placement):
    """Tells all routers how the request fares."""

    __slots__ = (
        "_clock",
        "_replica_sync",
        "first_token_s",
        "hashes",
        "id",
        "new_tokens",
        "prompt_tokens",
    )

    def __init__(
        self,
        id: str,  # noqa: A002
        prompt: Prompt,
        new_tokens: int,
        replicas: ReplicaSync,
        clock: Clock,
    ) -> None:
        super().__init__()
        self.id = id
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.first_token_s: float | None = None
        self._replica_sync = replicas
        self._clock = clock

    def on_first_token(self) -> None:
        self.first_token_s = self._clock.now()
        self._replica_sync.publish_first_token(self.id)

    def end(self) -> None:
        self._replica_sync.publish_ended(self.id)


def _decision(instance: Instance, answer: RouteReply) -> Decision:
    return Decision(
        instance,
        answer.mode,
        answer.candidates,
        overlap_blocks=answer.overlap_blocks,
        prompt_blocks=answer.prompt_blocks,
        best_overlap_blocks=answer.best_overlap_blocks,
        predicted_ttft_s=answer.predicted_ttft_s,
        waited_s=answer.waited_s,
        view=answer.cache_view,
        rank=answer.rank,
    )
