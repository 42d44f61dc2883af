"""A generation request from its body to its last byte: admission, deadline, counting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics, ModelMetrics
from dynamo.application.gateway import Gateway, ServedModel
from dynamo.application.generation.concurrency_limit import ConcurrencyLimit
from dynamo.application.generation.deadlines import TIMEOUT_HEADER, Deadlines, parse_timeout_header
from dynamo.application.generation.replies import OffsetReply, StreamReply, UnaryReply
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.openai.chat import CHAT_RESPONSE, chat_request, read_chat
from dynamo.application.openai.completions import (
    COMPLETION_RESPONSE,
    completion_requests,
    read_completion,
)
from dynamo.application.openai.generation_body import include_usage
from dynamo.application.openai.response_encoder import JsonStringCache, ResponseEncoder
from dynamo.application.openai.usage import UsageCounter
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.labels import LABELS_KEY
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.tasks import run_all
from dynamo.core.text import CompletionRequest, TextReply

log = logging.getLogger(__name__)

LABELS_HEADER = b"x-dynamo-labels"
"""Labels that the worker must bear, e.g. `zone=a,gpu=h100`."""


ProcessorCall = Callable[[Context, TextReply], Awaitable[None]]
"""What answers."""


class GenerationHandler:
    """/v1/chat/completions and /v1/completions."""

    def __init__(
        self, server: ServerSettings, gateway: Gateway, clock: Clock, metrics: FrontendMetrics
    ) -> None:
        self._unknown_roles = server.unknown_roles
        self._log_prompts = server.log_prompts
        self._gateway = gateway
        self._clock = clock
        self._metrics = metrics
        self._json_strings = JsonStringCache()
        self.concurrency = ConcurrencyLimit(
            server.max_concurrent_requests, server.max_waiting_requests
        )
        self.deadlines = Deadlines(clock, server.request_timeout)

    def update_settings(self, server: ServerSettings) -> None:
        """From now on these limits hold, and this of `log_prompts`; a request's deadline is that of
        its beginning."""
        self._log_prompts = server.log_prompts
        self.concurrency.update_limits(server.max_concurrent_requests, server.max_waiting_requests)
        if server.request_timeout != self.deadlines.timeout_s:
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
        form = ResponseEncoder(
            CHAT_RESPONSE, exchange.request_id, model, int(self._clock.wall()), include_usage=usage
        )
        exchange.streaming = bool(body.stream)
        work = partial(served.processor.chat, request)
        return self._generate(exchange, form, work, (request.options.n, 1, usage))

    def complete(self, exchange: Exchange) -> Awaitable[None]:
        """POST /v1/completions."""
        body = read_completion(exchange.request)
        model, served = self._gateway.find(body.model)
        exchange.model = served.names[0]
        requests = completion_requests(body, model)
        if self._log_prompts:
            log.info("prompt", extra={"fields": {"prompt": body.prompt}})
        usage = include_usage(body)
        form = ResponseEncoder(
            COMPLETION_RESPONSE,
            exchange.request_id,
            model,
            int(self._clock.wall()),
            include_usage=usage,
        )
        exchange.streaming = bool(body.stream)
        work = partial(_complete_all, served, requests)
        shape = (requests[0].options.n, len(requests), usage)
        return self._generate(exchange, form, work, shape)

    async def _generate(
        self,
        exchange: Exchange,
        form: ResponseEncoder,
        work: ProcessorCall,
        shape: tuple[int, int, bool],
    ) -> None:
        """`shape`: choices a prompt, prompts, and whether the stream ends with usage."""
        per_prompt, prompts, usage = shape
        headers = exchange.request.headers
        everybodys = deadlines = self.deadlines
        if TIMEOUT_HEADER in headers:
            deadlines = self._client_deadlines(headers[TIMEOUT_HEADER]) or everybodys
        choices = per_prompt * prompts
        metrics = self._metrics.for_model(exchange.model)
        tally = UsageCounter(per_prompt)
        started = self._clock.now()
        pace = TokenTiming(metrics, self._clock.now, started, choices)
        reply: StreamReply | UnaryReply
        if exchange.streaming:
            reply = StreamReply(
                exchange,
                form,
                tally,
                pace,
                self._json_strings,
                choices=choices,
                include_usage=usage,
            )
        else:
            reply = UnaryReply(exchange, form, tally, pace, choices=choices)
        deadline = deadlines.start(started)
        try:
            if not self.concurrency.try_acquire():
                await self.concurrency.acquire()
            try:
                left_s = deadline.expires_at - self._clock.now()
                answered = work(_make_context(exchange, left_s), reply)
                del work  # a conversation need not be kept while it is answered
                await answered
            finally:
                self.concurrency.release()
            reply.check_complete()
        except asyncio.CancelledError:
            deadlines.raise_if_expired(deadline)
            raise
        finally:
            deadlines.stop(deadline)
            if deadlines is not everybodys:
                deadlines.close()
            _record_metrics(
                metrics, tally, pace, reply.remaining_choices, self._clock.now() - started
            )

    def _client_deadlines(self, asked: bytes) -> Deadlines | None:
        """Where the client wants less than everybody's. Raises `InvalidRequest`."""
        asked_s = parse_timeout_header(asked.decode("latin-1"))
        return Deadlines(self._clock, asked_s) if asked_s < self.deadlines.timeout_s else None


def _make_context(exchange: Exchange, timeout_s: float) -> Context:
    headers = exchange.request.headers
    trace = headers.get(b"traceparent", b"").decode("latin-1")
    labels = headers.get(LABELS_HEADER, b"").decode("latin-1")
    about = {LABELS_KEY: labels} if labels else {}
    return Context(exchange.request_id, timeout_s=timeout_s, trace=trace, metadata=about)


def _record_metrics(
    metrics: ModelMetrics, tally: UsageCounter, pace: TokenTiming, left: int, seconds: float
) -> None:
    """`left`: choices that have not ended; of their tokens only the texts are known."""
    metrics.duration.observe(seconds)
    pace.flush()
    if not tally.prompt_tokens:
        return
    if tally.cached_tokens:
        metrics.cached_tokens.inc(tally.cached_tokens)
    metrics.input_length.observe(tally.prompt_tokens)
    ended = tally.completion_tokens
    metrics.output_length.observe(max(ended, pace.recorded_texts) if left else ended)


async def _complete_all(
    served: ServedModel, requests: list[CompletionRequest], context: Context, reply: TextReply
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
