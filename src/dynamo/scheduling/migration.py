"""Migration: continue a request at another worker when its worker fails.

The tokens sent so far become part of the prompt, so that the reader only notices a pause.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from dynamo.core.clock import Backoff, Clock
from dynamo.core.context import Context
from dynamo.core.errors import (
    ContextLengthExceeded,
    InstanceGone,
    MalformedAnswer,
    NoWorkers,
    Overloaded,
    PoisonedRequest,
    Unsupported,
    UpstreamFailed,
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.fast_path import SendToken
from dynamo.core.kv_events import worker_name
from dynamo.core.reply import LogprobsPerToken, Operator, Reply, SendRequest
from dynamo.core.text import TextPart
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""A request is poisoned when this many workers in a row fail while processing it."""
MAX_UPSTREAM_FAILURES = 3
"""A request is not sent again after so many failures in a row of servers behind workers."""
MAX_MALFORMED_ANSWERS = 2
"""The same for answers that could not be read. Another server may answer better, once."""
REPLACEMENT_TIMEOUT_S = 30.0
"""A request that lost its worker waits this long for another worker."""
INITIAL_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
ATTEMPT_STRIDE = 16
"""The router may use the attempt numbers in between for its own attempts."""


class ResumableReply(Reply):
    """The answer of one request across attempts. `admitted`: the present worker has begun.

    `in_text`: text was sent, so that no other worker can continue, at most begin again. The token
    log then has a 0 for each part.
    """

    __slots__ = (
        "_reply",
        "admitted",
        "complete",
        "in_text",
        "resumed_tokens",
        "started",
        "token_log",
    )

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.token_log: array[int] = array("I")
        self.resumed_tokens: int | None = None  # None: the first attempt
        self.started = False
        self.in_text = False
        self.admitted = False
        self.complete = False

    def begin(self, started: Started) -> None:
        self.admitted = True
        if not self.started:
            self.started = True
            self._reply.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if len(ids) == 1:
            self.token_log.append(ids[0])
        else:
            self.token_log.extend(ids)
        reply = self._reply  # calling a slot directly is slower in CPython 3.11
        return reply.tokens(ids, logprobs)

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return self._reply.open_fast_path(self.token_log) if token_log is None else None

    def text(self, part: TextPart) -> bool:
        self.in_text = True
        self.token_log.append(0)
        return self._reply.text(part)

    def restart(self) -> bool:
        if not self._reply.restart():
            return False
        self.in_text = False
        del self.token_log[:]
        return True

    def finish(self, end: Finish) -> None:
        self.complete = True
        if self.resumed_tokens is not None:
            count = self.resumed_tokens + end.completion_tokens
            end = replace(end, completion_tokens=count, cached_tokens=None)
        self._reply.finish(end)

    def finish_at_length(self) -> None:
        """Finish an answer that has all its tokens but lost the worker that would finish it."""
        self._reply.finish(Finish("length", len(self.token_log)))


@dataclass
class FailureHistory:
    """The failed attempts of one request, which decide whether and when it is retried."""

    attempts: int = 0
    progress: bool = False
    """Whether the last attempt sent tokens."""
    backoff: Backoff = field(
        default_factory=lambda: Backoff(2 * INITIAL_BACKOFF_S, MAX_BACKOFF_S, jitter=1.0)
    )
    """The pauses between attempts without progress."""
    worker_deaths: int = 0
    upstream_failures: int = 0
    ends_at_upstream: bool = False
    """Whether servers behind workers have failed too often."""
    avoided_workers: tuple[str, ...] = ()

    def record_failure(self, error: WorkerFailed, *, progress: bool, admitted: bool) -> None:
        """Count a failed attempt. `progress`: it sent tokens. `admitted`: the request was probably
        in the worker's running batch, so that it may have caused the failure. A server behind a
        worker that fails is no death of the worker."""
        self.attempts += 1
        self.progress = progress
        if progress:
            self.backoff.reset()
            self.worker_deaths = self.upstream_failures = 0
        if isinstance(error, UpstreamFailed):
            self.upstream_failures += 1
            self.ends_at_upstream = self.upstream_failures >= (
                MAX_MALFORMED_ANSWERS
                if isinstance(error, MalformedAnswer)
                else MAX_UPSTREAM_FAILURES
            )
        elif admitted and not isinstance(error, InstanceGone | WorkerDraining):
            self.worker_deaths += 1
        if error.instance and error.instance not in self.avoided_workers:
            self.avoided_workers = (*self.avoided_workers[-2:], error.instance)


MIGRATION_REASONS = (
    WorkerFailed.code,
    InstanceGone.code,
    WorkerDraining.code,
    UpstreamFailed.code,
    MalformedAnswer.code,
)
FAILED_MIGRATION_REASONS = ("no_workers", PoisonedRequest.code, "limit")


class Migration(Operator):
    """Retries a request at other workers until its answer is complete, at most `limit` times."""

    def __init__(self, clock: Clock, rng: Random, metrics: Registry, *, limit: int = 16) -> None:
        self._clock = clock
        self._rng = rng
        self._limit = limit
        self._migration_counter = metrics.counter(
            "dynamo_migrations_total", "Requests continued at another worker", ("reason",)
        )
        self._failed_migration_counter = metrics.counter(
            "dynamo_migrations_failed_total", "Requests that could not be continued", ("reason",)
        )
        for reason in MIGRATION_REASONS:
            self._migration_counter.labels(reason)
        for reason in FAILED_MIGRATION_REASONS:
            self._failed_migration_counter.labels(reason)

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        """Send the request, and retry it after a `WorkerFailed`.

        Raises `PoisonedRequest` after repeated worker deaths, `WorkerFailed` at the limit or
        without a replacement, `NoWorkers` only when there was no worker at the first attempt.
        """
        if not self._limit:
            return await call_next(request, context, reply)
        answer = ResumableReply(reply)
        try:
            await call_next(request, context, answer)
        except WorkerFailed as error:
            await self._migrate(request, context, answer, call_next, error)

    async def _migrate(
        self,
        request: GenerateRequest,
        context: Context,
        answer: ResumableReply,
        call_next: SendRequest,
        error: WorkerFailed,
    ) -> None:
        began_s = self._clock.now()
        failures = FailureHistory()
        answer.admitted = True  # engines confirm the admission of later attempts only
        while not answer.complete:
            self._record_failure(request, answer, failures, error)
            if len(answer.token_log) >= request.stops.max_tokens:
                answer.finish_at_length()
                return
            pause_s = 0.0 if failures.progress else failures.backoff.next_s(self._rng)
            await self._clock.sleep(pause_s)
            timeout_s = context.timeout_s
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (self._clock.now() - began_s))
            attempt = replace(
                context,
                attempt=context.attempt + failures.attempts * ATTEMPT_STRIDE,
                timeout_s=timeout_s,
                avoid=failures.avoided_workers,
            )
            answer.resumed_tokens, answer.admitted = len(answer.token_log), False
            resumed = resume_request(request, answer.token_log)
            if isinstance(error, WorkerDraining) and answer.token_log and error.instance:
                resumed = replace(resumed, kv_from=worker_name(error.instance, error.rank))
            failure = await self._retry(resumed, attempt, answer, call_next)
            if failure is None:
                return
            error = failure

    async def _retry(
        self,
        request: GenerateRequest,
        context: Context,
        answer: ResumableReply,
        call_next: SendRequest,
    ) -> WorkerFailed | None:
        """Send once there is a worker. Return the failure of that worker, or None. Raises
        `WorkerFailed` when no worker appears in time."""
        began_s = self._clock.now()
        while True:
            try:
                await call_next(request, context, answer)
                return None
            except WorkerFailed as error:
                return error
            except (NoWorkers, Overloaded) as error:  # no worker, or one with too many unsent bytes
                if self._clock.now() - began_s >= REPLACEMENT_TIMEOUT_S:
                    self._failed_migration_counter.labels("no_workers").inc()
                    raise WorkerFailed(
                        "the worker was lost and no other worker took the request for "
                        f"{REPLACEMENT_TIMEOUT_S:g} s: {error.message}"
                    ) from error
            except Unsupported as error:
                if not answer.token_log:
                    raise
                raise WorkerFailed(
                    "the worker was lost and no other one can continue the answer: "
                    f"{error.message}",
                    hint="send the request again",
                ) from error
            except ContextLengthExceeded:
                if not answer.token_log:
                    raise
                answer.finish_at_length()
                return None
            if context.avoid:
                context = replace(context, avoid=())
            else:
                await self._clock.sleep(INITIAL_BACKOFF_S * (1 + self._rng.random()))

    def _record_failure(
        self,
        request: GenerateRequest,
        answer: ResumableReply,
        failures: FailureHistory,
        error: WorkerFailed,
    ) -> None:
        """Count the failure. Raises `PoisonedRequest` or `error` when no retry is left."""
        progress = len(answer.token_log) > (answer.resumed_tokens or 0) and not answer.in_text
        if answer.in_text and not answer.restart():
            raise WorkerFailed(
                f"{error.message}; an answer in text cannot continue at another worker",
                hint="send the request again",
            ) from error
        failures.record_failure(error, progress=progress, admitted=answer.admitted)
        if failures.worker_deaths >= MAX_WORKER_DEATHS:
            self._failed_migration_counter.labels(PoisonedRequest.code).inc()
            raise PoisonedRequest(
                f"{failures.worker_deaths} workers in a row failed while processing this request; "
                f"the last error: {error.message}",
                hint="this request seems to crash the engine and is not retried",
            ) from error
        if failures.attempts > self._limit or failures.ends_at_upstream:
            self._failed_migration_counter.labels("limit").inc()
            raise error
        self._migration_counter.labels(error.code).inc()
        fields = {
            "request": request.request_id,
            "tokens": len(answer.token_log),
            "attempts": failures.attempts,
            "error": error.message,
        }
        log.debug("request continues at another worker", extra={"fields": fields})


def resume_request(request: GenerateRequest, ids: array[int]) -> GenerateRequest:
    """Return the request that continues after the generated `ids`. Its priority is higher by one,
    because its reader is already waiting."""
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
