"""A generation request from its body to its last byte: admission, deadline, counting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from dynamo.application.admission import Admission
from dynamo.application.chat import CHAT, chat_request, read_chat
from dynamo.application.completions import COMPLETION, completion_requests, read_completion
from dynamo.application.deadlines import TIMEOUT_HEADER, Deadlines, asked_limit_s
from dynamo.application.exchange import Exchange
from dynamo.application.format import Format
from dynamo.application.gateway import Gateway, Served
from dynamo.application.metrics import FrontendMetrics, ModelMetrics
from dynamo.application.options import include_usage
from dynamo.application.pace import Pace
from dynamo.application.replies import AnswerReply, OffsetReply, StreamReply
from dynamo.application.sse import Escapes
from dynamo.application.usage import Tally
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.labels import LABELS
from dynamo.core.settings.schema import Server
from dynamo.core.tasks import run_all
from dynamo.core.text import CompletionRequest, TextReply

log = logging.getLogger(__name__)

LABELS_HEADER = b"x-dynamo-labels"
"""Labels that the worker must bear, e.g. `zone=a,gpu=h100`."""


Work = Callable[[Context, TextReply], Awaitable[None]]
"""What answers."""


class Generation:
    """/v1/chat/completions and /v1/completions."""

    def __init__(
        self, server: Server, gateway: Gateway, clock: Clock, metrics: FrontendMetrics
    ) -> None:
        self._unknown_roles = server.unknown_roles
        self._log_prompts = server.log_prompts
        self._gateway = gateway
        self._clock = clock
        self._metrics = metrics
        self._escapes = Escapes()
        self.admission = Admission(server.max_concurrent_requests, server.max_waiting_requests)
        self.deadlines = Deadlines(clock, server.request_timeout)

    def limit(self, server: Server) -> None:
        """From now on these limits hold, and this of `log_prompts`; a request's deadline is that of
        its beginning."""
        self._log_prompts = server.log_prompts
        self.admission.limit_to(server.max_concurrent_requests, server.max_waiting_requests)
        if server.request_timeout != self.deadlines.limit_s:
            self.deadlines = Deadlines(self._clock, server.request_timeout)

    def chat(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/chat/completions."""
        body = read_chat(exchange.request)
        model, served = self._gateway.find(body.model)
        exchange.model = served.names[0]
        request = chat_request(body, model, self._unknown_roles)
        if self._log_prompts:
            log.info("prompt", extra={"fields": {"messages": request.messages}})
        usage = include_usage(body)
        form = Format(CHAT, exchange.id, model, int(self._clock.wall()), usage=usage)
        exchange.streams = bool(body.stream)
        work = partial(served.processor.chat, request)
        return self._answer(exchange, form, work, (request.options.n, 1, usage))

    def complete(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/completions."""
        body = read_completion(exchange.request)
        model, served = self._gateway.find(body.model)
        exchange.model = served.names[0]
        requests = completion_requests(body, model)
        if self._log_prompts:
            log.info("prompt", extra={"fields": {"prompt": body.prompt}})
        usage = include_usage(body)
        form = Format(COMPLETION, exchange.id, model, int(self._clock.wall()), usage=usage)
        exchange.streams = bool(body.stream)
        work = partial(_complete_all, served, requests)
        shape = (requests[0].options.n, len(requests), usage)
        return self._answer(exchange, form, work, shape)

    async def _answer(
        self,
        exchange: Exchange,
        form: Format,
        work: Work,
        shape: tuple[int, int, bool],
    ) -> None:
        """`shape`: choices a prompt, prompts, and whether the stream ends with usage."""
        per_prompt, prompts, usage = shape
        headers = exchange.request.headers
        everybodys = deadlines = self.deadlines
        if TIMEOUT_HEADER in headers:
            deadlines = self._own_deadlines(headers[TIMEOUT_HEADER]) or everybodys
        choices = per_prompt * prompts
        metrics = self._metrics.model(exchange.model)
        tally = Tally(per_prompt)
        started = self._clock.now()
        pace = Pace(metrics, self._clock.now, started, choices)
        reply: StreamReply | AnswerReply
        if exchange.streams:
            reply = StreamReply(
                exchange, form, tally, pace, self._escapes, choices=choices, usage=usage
            )
        else:
            reply = AnswerReply(exchange, form, tally, pace, choices=choices)
        deadline = deadlines.start(started)
        try:
            if not self.admission.enter_at_once():
                await self.admission.enter()
            try:
                left_s = deadline.when - self._clock.now()
                answered = work(_context(exchange, left_s), reply)
                del work  # a conversation need not be kept while it is answered
                await answered
            finally:
                self.admission.leave()
            reply.close()
        except asyncio.CancelledError:
            deadlines.translate(deadline)
            raise
        finally:
            deadlines.stop(deadline)
            if deadlines is not everybodys:
                deadlines.close()
            _count(metrics, tally, pace, reply.left, self._clock.now() - started)

    def _own_deadlines(self, asked: bytes) -> Deadlines | None:
        """Where the client wants less than everybody's. Raises `InvalidRequest`."""
        asked_s = asked_limit_s(asked.decode("latin-1"))
        return Deadlines(self._clock, asked_s) if asked_s < self.deadlines.limit_s else None


def _context(exchange: Exchange, timeout_s: float) -> Context:
    headers = exchange.request.headers
    trace = headers.get(b"traceparent", b"").decode("latin-1")
    labels = headers.get(LABELS_HEADER, b"").decode("latin-1")
    about = {LABELS: labels} if labels else {}
    return Context(exchange.id, timeout_s=timeout_s, trace=trace, metadata=about)


def _count(metrics: ModelMetrics, tally: Tally, pace: Pace, left: int, seconds: float) -> None:
    """`left`: choices that have not ended; of their tokens only the texts are known."""
    metrics.duration.observe(seconds)
    pace.count()
    if not tally.prompt_tokens:
        return
    if tally.cached_tokens:
        metrics.cached_tokens.inc(tally.cached_tokens)
    metrics.input_length.observe(tally.prompt_tokens)
    ended = tally.completion_tokens
    metrics.output_length.observe(max(ended, pace.events) if left else ended)


async def _complete_all(
    served: Served, requests: list[CompletionRequest], context: Context, reply: TextReply
) -> None:
    processor = served.processor
    if len(requests) == 1:
        await processor.complete(requests[0], context, reply)
        return
    per_prompt = requests[0].options.n
    await run_all(
        *(
            processor.complete(
                request,
                replace(context, request_id=f"{context.request_id}.{index}"),
                OffsetReply(reply, index * per_prompt),
            )
            for index, request in enumerate(requests)
        )
    )
