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
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.fast_path import SendToken
from dynamo.core.reply import LogprobsPerToken, Operator, Reply, SendRequest
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""So many workers may die of one request."""
REPLACEMENT_TIMEOUT_S = 30.0
"""A request that lost its worker waits so long for another to be there."""
INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
ATTEMPT_STRIDE = 16
"""A router below may number tries of its own between two of ours."""


class ResumableReply(Reply):
    """What one request has been answered so far, by however many workers."""

    __slots__ = ("_reply", "admitted", "complete", "resumed_tokens", "started", "token_ids")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.token_ids = array("I")
        self.resumed_tokens = 0
        self.started = False
        self.admitted = False
        self.complete = False

    def begin(self, started: Started) -> None:
        self.admitted = True
        if not self.started:
            self.started = True
            self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if len(ids) == 1:
            self.token_ids.append(ids[0])
        else:
            self.token_ids.extend(ids)
        reply = self._reply  # calling a slot directly is slower in CPython 3.11
        return reply.tokens(ids, logprobs)

    @property
    def token_log(self) -> array[int]:
        return self.token_ids

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return self._reply.open_fast_path(self.token_ids) if token_log is None else None

    def finish(self, end: Finish) -> None:
        self.complete = True
        if self.resumed_tokens:
            end = replace(end, completion_tokens=self.resumed_tokens + end.completion_tokens)
        self._reply.finish(end)

    def finish_at_length(self) -> None:
        """All that was wanted is there; who would have said so is not."""
        self._reply.finish(Finish("length", len(self.token_ids)))


class FailureHistory:
    """What one request has been through: whether it may go on, and after which pause."""

    __slots__ = ("attempts", "attempts_without_progress", "avoided_workers", "worker_deaths")

    def __init__(self) -> None:
        self.attempts = 0
        self.attempts_without_progress = 0
        self.worker_deaths = 0
        self.avoided_workers: tuple[str, ...] = ()

    def record_failure(self, error: WorkerFailed, *, progress: bool, admitted: bool) -> None:
        """An attempt ended. `admitted`: it was in the worker's running batch, as far as is known;
        `progress`: it brought tokens."""
        self.attempts += 1
        self.attempts_without_progress = 0 if progress else self.attempts_without_progress + 1
        if progress:
            self.worker_deaths = 0
        if admitted and not isinstance(error, InstanceGone | WorkerDraining):
            self.worker_deaths += 1
        if error.instance and error.instance not in self.avoided_workers:
            self.avoided_workers = (*self.avoided_workers[-2:], error.instance)

    def draw_backoff_s(self, rng: Random) -> float:
        """Nothing after a try that brought tokens, else full jitter under a bound that doubles."""
        if not self.attempts_without_progress:
            return 0.0
        bound = INITIAL_BACKOFF_S * 2.0 ** min(self.attempts_without_progress, 10)
        return rng.random() * min(bound, MAX_BACKOFF_S)


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
        self._migration_counter = registry.counter(
            "dynamo_migrations_total", "Requests that went on at another worker", ("reason",)
        )
        self._failed_migration_counter = registry.counter(
            "dynamo_migrations_failed_total", "Requests that could not go on", ("reason",)
        )

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Raises `PoisonedRequest` when workers die of it, `WorkerFailed` when the limit is reached
        or no worker comes back, `NoWorkers` only where there was none to begin with."""
        if not self._limit:
            return await call_next(request, context, reply)
        said = ResumableReply(reply)
        try:
            await call_next(request, context, said)
        except WorkerFailed as error:
            await self._migrate(request, context, said, call_next, error)

    async def _migrate(
        self,
        request: GenerateRequest,
        context: Context,
        said: ResumableReply,
        call_next: SendRequest,
        error: WorkerFailed,
    ) -> None:
        began = self._clock.now()
        failures = FailureHistory()
        said.admitted = True  # what has not failed before does not say when it is admitted
        while not said.complete:
            self._record_failure(request, said, failures, error)
            if len(said.token_ids) >= request.stops.max_tokens:
                said.finish_at_length()
                return
            await self._clock.sleep(failures.draw_backoff_s(self._rng))
            attempt = replace(
                context,
                attempt=context.attempt + failures.attempts * ATTEMPT_STRIDE,
                timeout_s=_remaining_s(context.timeout_s, self._clock.now() - began),
                avoid=failures.avoided_workers,
            )
            said.resumed_tokens, said.admitted = len(said.token_ids), False
            again = await self._retry(
                resume_request(request, said.token_ids), attempt, said, call_next
            )
            if again is None:
                return
            error = again

    async def _retry(
        self,
        request: GenerateRequest,
        context: Context,
        said: ResumableReply,
        call_next: SendRequest,
    ) -> WorkerFailed | None:
        """One try, which waits while no worker is there: how its worker failed, if it did. Raises
        `WorkerFailed` where no worker comes."""
        since = self._clock.now()
        while True:
            try:
                await call_next(request, context, said)
                return None
            except WorkerFailed as error:
                return error
            except NoWorkers as error:
                if self._clock.now() - since >= REPLACEMENT_TIMEOUT_S:
                    self._failed_migration_counter.labels("no_workers").inc()
                    raise WorkerFailed(
                        f"the worker was lost, and none came in {REPLACEMENT_TIMEOUT_S:g} s: {error.message}"
                    ) from error
            except ContextLengthExceeded:
                if not said.token_ids:
                    raise
                said.finish_at_length()
                return None
            if context.avoid:
                context = replace(context, avoid=())
            else:
                await self._clock.sleep(INITIAL_BACKOFF_S * (1 + self._rng.random()))

    def _record_failure(
        self,
        request: GenerateRequest,
        said: ResumableReply,
        failures: FailureHistory,
        error: WorkerFailed,
    ) -> None:
        """Count the failure. Raises where it was the last that this request may have."""
        progress = len(said.token_ids) > said.resumed_tokens
        failures.record_failure(error, progress=progress, admitted=said.admitted)
        if failures.worker_deaths >= MAX_WORKER_DEATHS:
            self._failed_migration_counter.labels(PoisonedRequest.code).inc()
            raise PoisonedRequest(
                f"{failures.worker_deaths} workers failed one after the other while they had this request "
                f"in work, the last one: {error.message}",
                hint="this request seems to crash the engine; it is not tried again",
            ) from error
        if failures.attempts > self._limit:
            self._failed_migration_counter.labels("limit").inc()
            raise error
        self._migration_counter.labels(error.code).inc()
        log.debug(
            "request goes on elsewhere",
            extra={
                "fields": {
                    "request": request.request_id,
                    "tokens": len(said.token_ids),
                    "tries": failures.attempts,
                    "error": error.message,
                }
            },
        )


def resume_request(request: GenerateRequest, ids: array[int]) -> GenerateRequest:
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


def _remaining_s(timeout_s: float | None, elapsed_s: float) -> float | None:
    return None if timeout_s is None else max(0.0, timeout_s - elapsed_s)
