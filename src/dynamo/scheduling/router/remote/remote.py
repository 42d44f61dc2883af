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
from dynamo.core.errors import NotFound, NotReady, NoWorkers, ProtocolError, WorkerFailed
from dynamo.core.values import GenerateRequest
from dynamo.runtime.client import Client
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.policy import BasicPolicy, Decision, Policy, Ticket
from dynamo.scheduling.router.prompt import Prompt, ReadPrompt
from dynamo.scheduling.router.remote.messages import (
    TAKEN,
    Answer,
    decode_answer,
    encode_ask,
)
from dynamo.scheduling.router.replicas.replicas import Replicas
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

TAKEN_S = 0.25
"""A router that has not even taken a question by then is asked no more for `AWAY_S`."""
AWAY_S = 2.0
SETTLED_S = 0.5
"""Whether a router answers is told no more often."""
MEANWHILE = "least_loaded"
FAILURES = (
    WorkerFailed,
    NoWorkers,
    NotFound,
    NotReady,
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
        replicas: Replicas,
        read: ReadPrompt,
        clock: Clock,
        *,
        block_tokens: int,
        metrics: Registry | None = None,
    ) -> None:
        self._client = client
        self._routers = routers
        self._replicas = replicas
        self._read = read
        self._clock = clock
        self._block_tokens = block_tokens
        self._alone = BasicPolicy(client, MEANWHILE)
        self._away: dict[str, float] = {}
        self._proven: set[str] = set()
        self._on_trial: set[str] = set()
        self._failing: set[str] = set()
        self._views: dict[str, str] = {}
        self._asking = True
        self._told_at = -math.inf
        self._picked_alone = (metrics or Registry()).counter(
            "dynamo_router_unasked_total", "Requests routed without the router, which was away"
        )

    async def choose(
        self, request: GenerateRequest, context: Context, tried: AbstractSet[str]
    ) -> Decision:
        prompt = self._read(request)
        made = await self._asked(request, context, prompt, tried)
        self._told(made is not None)
        if made is None:
            self._picked_alone.inc()
            made = await self._alone.choose(request, context, tried)
        name = f"{context.request_id}/{request.choice}/{context.attempt}"
        overlap = made.overlap_blocks * self._block_tokens
        new_tokens = max(1, prompt.tokens - overlap)
        ticket = RemoteTicket(name, prompt, new_tokens, self._replicas, self._clock)
        self._replicas.routed(made.worker, ticket)
        return replace(made, ticket=ticket)

    def routers(self) -> dict[str, str]:
        """Each router that is there: "answers", "fails", "away" (took no question in time), or "not
        asked yet"."""
        now = self._clock.now()
        return {name: self._state(name, now) for name in self._routers.instances}

    def views(self) -> dict[str, str]:
        """How each worker's cache was known when a router last chose it; empty while none
        answers."""
        if "answers" not in self.routers().values():
            return {}
        live = self._client.instances
        self._views = {
            name: view for name, view in self._views.items() if name.partition("/")[0] in live
        }
        return dict(self._views)

    async def close(self) -> None:
        await self._replicas.close()
        await self._routers.close()

    async def _asked(
        self,
        request: GenerateRequest,
        context: Context,
        prompt: Prompt,
        tried: AbstractSet[str],
    ) -> Decision | None:
        """What a router says; None where none can say."""
        failed: set[str] = set()
        while candidates := self._present() - failed:
            router = self._routers.pick("round_robin", candidates)
            ask = encode_ask(request, prompt, tuple(tried))
            try:
                answer = await self._tested(router, ask, context)
            except FAILURES as error:
                failed.add(router.id)
                if isinstance(error, TimeoutError):
                    self._away[router.id] = self._clock.now() + AWAY_S
                self._failed(router.id, str(error))
                continue
            self._failing.discard(router.id)
            instance = self._client.instances.get(answer.instance)
            if instance is not None:
                made = _decision(instance, answer)
                if made.view:
                    self._views[made.worker] = made.view
                return made
            if answer.instance in tried:
                return None
            tried = {*tried, answer.instance}  # not known here, or withheld
        return None

    def _present(self) -> AbstractSet[str]:
        """Routers that may be asked. One that has answered nothing yet gets one question, as long
        as there are others: it may still be busy with its start."""
        live: AbstractSet[str] = self._routers.instances.keys()
        if self._away:
            now = self._clock.now()
            self._away = {name: until for name, until in self._away.items() if until > now}
            live = live - self._away.keys()
        if self._on_trial and not self._proven.isdisjoint(live):
            live = live - self._on_trial
        return live

    async def _tested(self, router: Instance, payload: bytes, context: Context) -> Answer:
        if router.id in self._proven:
            return await self._call(router, payload, context)
        self._on_trial.add(router.id)
        try:
            answer = await self._call(router, payload, context)
        finally:
            self._on_trial.discard(router.id)
        self._proven &= self._routers.instances.keys()
        self._proven.add(router.id)
        return answer

    async def _call(self, router: Instance, payload: bytes, context: Context) -> Answer:
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(TAKEN_S) as patience:

                def sink(item: bytes) -> bool:
                    if item == TAKEN:
                        patience.reschedule(None)
                    else:
                        answers.append(item)
                    return True

                await self._routers.call(router, payload, context, sink)
        except TimeoutError:
            raise TimeoutError(f"router {router.id} did not answer in {TAKEN_S} s") from None
        if not answers:
            raise WorkerFailed(f"router {router.id} ended without an answer")
        return decode_answer(answers[0])

    def _state(self, router: str, now: float) -> str:
        if self._away.get(router, now) > now:
            return "away"
        if router in self._failing:
            return "fails"
        return "answers" if router in self._proven else "not asked yet"

    def _failed(self, router: str, error: str) -> None:
        """Told once until it answers again, however many requests hear of it."""
        if router not in self._failing:
            self._failing.add(router)
            fields = {"router": router, "error": error}
            log.warning("a router cannot say", extra={"fields": fields})

    def _told(self, asked: bool) -> None:
        now = self._clock.now()
        if asked == self._asking or now - self._told_at < SETTLED_S:
            return
        self._asking, self._told_at = asked, now
        if asked:
            log.info("the router answers again")
        else:
            log.warning("no router: picking alone")


class RemoteTicket(Ticket):
    """Tells all routers how the request fares."""

    __slots__ = (
        "_clock",
        "_replicas",
        "first_s",
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
        replicas: Replicas,
        clock: Clock,
    ) -> None:
        super().__init__()
        self.id = id
        self.prompt_tokens = prompt.tokens
        self.hashes = prompt.hashes
        self.new_tokens = new_tokens
        self.first_s: float | None = None
        self._replicas = replicas
        self._clock = clock

    def first_token(self) -> None:
        self.first_s = self._clock.now()
        self._replicas.first_token(self.id)

    def end(self) -> None:
        self._replicas.ended(self.id)


def _decision(instance: Instance, answer: Answer) -> Decision:
    return Decision(
        instance,
        answer.mode,
        answer.candidates,
        overlap_blocks=answer.overlap_blocks,
        prompt_blocks=answer.prompt_blocks,
        best_overlap_blocks=answer.best_overlap_blocks,
        predicted_ttft_s=answer.predicted_ttft_s,
        waited_s=answer.waited_s,
        view=answer.view,
        rank=answer.rank,
    )
