"""Goes on elsewhere when a worker dies: with the tokens already sent as part of the prompt, so that
the reader notices nothing but a pause."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import (
    ContextLengthExceeded,
    InstanceGone,
    NoWorkers,
    PoisonedRequest,
    WorkerFailed,
    WorkerLeaving,
)
from dynamo.core.reply import Extra, Operator, Reply, Send, Shortcut
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

DEADLY = 3
"""So many workers may die of one request."""
RECOVERY_S = 30.0
"""A request that lost its worker waits so long for another to be there."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
ATTEMPTS_APART = 16
"""A router below may number tries of its own between two of ours."""


class Said(Reply):
    """What one request has been answered so far, by however many workers."""

    __slots__ = ("_reply", "admitted", "before", "complete", "ids", "started")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.ids = array("I")
        self.before = 0
        self.started = False
        self.admitted = False
        self.complete = False

    def begin(self, started: Started) -> None:
        self.admitted = True
        if not self.started:
            self.started = True
            self._reply.begin(started)

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        if len(ids) == 1:
            self.ids.append(ids[0])
        else:
            self.ids.extend(ids)
        reply = self._reply  # calling a slot directly is slower in CPython 3.11
        return reply.tokens(ids, extra)

    @property
    def kept(self) -> array[int]:
        return self.ids

    def shortcut(self, kept: array[int] | None = None) -> Shortcut | None:
        return self._reply.shortcut(self.ids) if kept is None else None

    def finish(self, end: Finish) -> None:
        self.complete = True
        if self.before:
            end = replace(end, completion_tokens=self.before + end.completion_tokens)
        self._reply.finish(end)

    def finish_for_length(self) -> None:
        """All that was wanted is there; who would have said so is not."""
        self._reply.finish(Finish("length", len(self.ids)))


class Failures:
    """What one request has been through: whether it may go on, and after which pause."""

    __slots__ = ("avoid", "deaths", "idle_tries", "tries")

    def __init__(self) -> None:
        self.tries = 0
        self.idle_tries = 0
        self.deaths = 0
        self.avoid: tuple[str, ...] = ()

    def failed(self, error: WorkerFailed, *, progress: bool, admitted: bool) -> None:
        """An attempt ended. `admitted`: it was in the worker's running batch, as far as is known;
        `progress`: it brought tokens."""
        self.tries += 1
        self.idle_tries = 0 if progress else self.idle_tries + 1
        if progress:
            self.deaths = 0
        if admitted and not isinstance(error, InstanceGone | WorkerLeaving):
            self.deaths += 1
        if error.instance and error.instance not in self.avoid:
            self.avoid = (*self.avoid[-2:], error.instance)

    def pause_s(self, rng: Random) -> float:
        """Nothing after a try that brought tokens, else full jitter under a bound that doubles."""
        if not self.idle_tries:
            return 0.0
        bound = FIRST_PAUSE_S * 2.0 ** min(self.idle_tries, 10)
        return rng.random() * min(bound, LONGEST_PAUSE_S)


class Migration(Operator):
    """Sends a request on until it is answered in full. `limit`: how often it may go on elsewhere;
    0: never."""

    def __init__(
        self, clock: Clock, rng: Random, metrics: Registry | None = None, *, limit: int = 16
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._limit = limit
        registry = metrics or Registry()
        self._moved = registry.counter(
            "dynamo_migrations_total", "Requests that went on at another worker", ("reason",)
        )
        self._lost = registry.counter(
            "dynamo_migrations_failed_total", "Requests that could not go on", ("reason",)
        )

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, onward: Send
    ) -> None:
        """Raises `PoisonedRequest` when workers die of it, `WorkerFailed` when the limit is reached
        or no worker comes back, `NoWorkers` only where there was none to begin with."""
        if not self._limit:
            return await onward(request, context, reply)
        said = Said(reply)
        try:
            await onward(request, context, said)
        except WorkerFailed as error:
            await self._go_on(request, context, said, onward, error)

    async def _go_on(
        self,
        request: GenerateRequest,
        context: Context,
        said: Said,
        onward: Send,
        error: WorkerFailed,
    ) -> None:
        began = self._clock.now()
        failures = Failures()
        said.admitted = True  # what has not failed before does not say when it is admitted
        while not said.complete:
            self._note(request, said, failures, error)
            if len(said.ids) >= request.stops.max_tokens:
                said.finish_for_length()
                return
            await self._clock.sleep(failures.pause_s(self._rng))
            attempt = replace(
                context,
                attempt=context.attempt + failures.tries * ATTEMPTS_APART,
                timeout_s=_left(context.timeout_s, self._clock.now() - began),
                avoid=failures.avoid,
            )
            said.before, said.admitted = len(said.ids), False
            again = await self._attempt(resumed(request, said.ids), attempt, said, onward)
            if again is None:
                return
            error = again

    async def _attempt(
        self, request: GenerateRequest, context: Context, said: Said, onward: Send
    ) -> WorkerFailed | None:
        """One try, which waits while no worker is there: how its worker failed, if it did. Raises
        `WorkerFailed` where no worker comes."""
        since = self._clock.now()
        while True:
            try:
                await onward(request, context, said)
                return None
            except WorkerFailed as error:
                return error
            except NoWorkers as error:
                if self._clock.now() - since >= RECOVERY_S:
                    self._lost.labels("no_workers").inc()
                    raise WorkerFailed(
                        f"the worker was lost, and none came in {RECOVERY_S:g} s: {error.message}"
                    ) from error
            except ContextLengthExceeded:
                if not said.ids:
                    raise
                said.finish_for_length()
                return None
            if context.avoid:
                context = replace(context, avoid=())
            else:
                await self._clock.sleep(FIRST_PAUSE_S * (1 + self._rng.random()))

    def _note(
        self, request: GenerateRequest, said: Said, failures: Failures, error: WorkerFailed
    ) -> None:
        """Count the failure. Raises where it was the last that this request may have."""
        progress = len(said.ids) > said.before
        failures.failed(error, progress=progress, admitted=said.admitted)
        if failures.deaths >= DEADLY:
            self._lost.labels(PoisonedRequest.code).inc()
            raise PoisonedRequest(
                f"{failures.deaths} workers failed one after the other while they had this request "
                f"in work, the last one: {error.message}",
                hint="this request seems to crash the engine; it is not tried again",
            ) from error
        if failures.tries > self._limit:
            self._lost.labels("limit").inc()
            raise error
        self._moved.labels(error.code).inc()
        log.debug(
            "request goes on elsewhere",
            extra={
                "fields": {
                    "request": request.request_id,
                    "tokens": len(said.ids),
                    "tries": failures.tries,
                    "error": error.message,
                }
            },
        )


def resumed(request: GenerateRequest, ids: array[int]) -> GenerateRequest:
    """`request` as a worker takes it up that is to continue after `ids`; ahead of its equals, for
    its reader waits already."""
    count, stops = len(ids), request.stops
    return replace(
        request,
        token_ids=request.token_ids + ids.tobytes(),
        resumed=request.resumed + count,
        stops=replace(
            stops,
            max_tokens=stops.max_tokens - count,
            min_tokens=max(0, stops.min_tokens - count),
        ),
        priority=request.priority + 1,
    )


def _left(timeout_s: float | None, elapsed_s: float) -> float | None:
    return None if timeout_s is None else max(0.0, timeout_s - elapsed_s)
