"""The routes that generate text: limits, deadline, answer and metrics of each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from msgspec.structs import replace

from dynamo.application.access import CallerLimits, caller_key
from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics, ModelMetrics, TokenTiming
from dynamo.application.gateway import Gateway, ServedModel
from dynamo.application.generation.concurrency_limit import ConcurrencyLimits
from dynamo.application.generation.deadlines import Deadlines
from dynamo.application.generation.replies import (
    MAX_HOLD_S,
    CountedStreamReply,
    HttpReply,
    OffsetReply,
    StreamReply,
    UnaryReply,
)
from dynamo.application.generation.stories import Stories
from dynamo.application.items import ItemWriter, UsageCounter
from dynamo.application.openai.body import decode_body
from dynamo.application.openai.chat import (
    CHAT_RESPONSE,
    ChatParts,
    chat_parts,
    chat_request,
    read_chat,
)
from dynamo.application.openai.completions import (
    COMPLETION_DECODER,
    COMPLETION_RESPONSE,
    completion_requests,
)
from dynamo.application.openai.generation_body import (
    MAX_NAME_BYTES,
    TIER_PRIORITIES,
    GenerationBody,
    check_size,
)
from dynamo.application.openai.logprobs import PromptLogprobsOptions
from dynamo.application.openai.tools import names_one_function
from dynamo.application.openai.writer import REASONING_FIELDS, OpenAIWriter, ResponseTemplate
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.labels import LABELS_KEY
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.tasks import run_in_slices
from dynamo.core.text import ChatRequest, CompletionRequest, TextOptions, TextReply
from dynamo.telemetry.logs import PROMPTS_LOGGER
from dynamo.telemetry.trace_context import TRACESTATE

prompt_log = logging.getLogger(PROMPTS_LOGGER)

LABELS_HEADER = b"x-dynamo-labels"
"""The labels that the worker must have, e.g. `zone=a,gpu=h100`."""

PROMPTS_PER_SLICE = 4
"""So many prompts of a request are encoded in one iteration of the event loop."""

ProcessorCall = Callable[[Context, TextReply], Awaitable[None]]
"""Answers one HTTP request by a processor."""


class GenerationHandler:
    """Answers chats and completions of OpenAI, and by `answer_chat` the chats of other APIs."""

    def __init__(
        self,
        server: ServerSettings,
        gateway: Gateway,
        clock: Clock,
        metrics: FrontendMetrics,
        caller_limits: CallerLimits,
    ) -> None:
        self._unknown_roles = server.unknown_roles
        field = server.reasoning_field
        reasoning_fields = REASONING_FIELDS if field == "both" else (field,)
        self._chat_response = replace(CHAT_RESPONSE, reasoning_fields=reasoning_fields)
        self._log_prompts = server.log_prompts
        self._hold_s = 0.0
        self._passes_key = server.pass_api_key
        self._gateway = gateway
        self._clock = clock
        self._metrics = metrics
        self._caller_limits = caller_limits
        self.stories: Stories | None = None
        self.concurrency = ConcurrencyLimits(
            server.max_concurrent_requests, server.max_waiting_requests
        )
        self.deadlines = Deadlines(clock, server.request_timeout)

    def update_settings(self, server: ServerSettings, ttft_slo: float) -> None:
        """Apply reloaded limits and log_prompts. Requests in flight keep their deadlines."""
        self._log_prompts = server.log_prompts
        self._hold_s = min(ttft_slo, MAX_HOLD_S)
        self.concurrency.update_limits(server.max_concurrent_requests, server.max_waiting_requests)
        if server.request_timeout != self.deadlines.timeout_s:
            self.deadlines = Deadlines(self._clock, server.request_timeout)

    def chat(self, exchange: Exchange) -> Awaitable[object]:
        """POST /v1/chat/completions."""
        body = read_chat(exchange.request)
        prompt = None
        if body.prompt_logprobs is not None:
            prompt = PromptLogprobsOptions(field=body.prompt_logprobs, place="response")
        template = self._chat_response
        if body.tool_choice and names_one_function(body.tool_choice):
            template = replace(template, call_reason="stop")
        if body.service_tier in TIER_PRIORITIES:
            template = replace(template, service_tier=body.service_tier or "")
        exchange.streaming = bool(body.stream)
        model, served = self._gateway.find(body.model)
        exchange.model = served.names[0]
        request = chat_request(chat_parts(body), model, self._unknown_roles)
        writer = self._openai_writer(exchange, template, model, body, prompt)
        return self.answer_chat(exchange, request, served, writer)

    def answer_chat(
        self, exchange: Exchange, request: ChatRequest, served: ServedModel, writer: ItemWriter
    ) -> Awaitable[HttpReply]:
        """Answer a chat by a writer. Returns the reply later. Raises the processor's errors."""
        if request.options.priority or self._caller_limits.needed:
            options = self._caller_limits.apply(request.options, exchange.request)
            request = replace(request, options=options)
        if self._log_prompts:
            prompt_log.info("prompt", extra={"fields": {"messages": request.messages}})
        call = partial(served.processor.chat, request)
        return self._generate(exchange, call, writer, request.options)

    def read_chat_request(
        self, exchange: Exchange, chat: ChatParts
    ) -> tuple[ChatRequest, ServedModel]:
        """Return the request for the processor, and its model. Raises `InvalidRequest` and
        `ModelNotFound`."""
        exchange.streaming = bool(chat.fields.stream)
        model, served = self._gateway.find(chat.fields.model)
        exchange.model = served.names[0]
        return chat_request(chat, model, self._unknown_roles), served

    async def count_tokens(self, exchange: Exchange, chat: ChatParts) -> int:
        """Return the tokens in the prompt of a chat. Raises as `answer_chat`."""
        request, served = self.read_chat_request(exchange, chat)
        async with self.concurrency[served.names[0]].slot():
            if exchange.request.is_large:
                await exchange.request.pause()
            return len(await served.processor.tokenize(request))

    def complete(self, exchange: Exchange) -> Awaitable[object]:
        """POST /v1/completions."""
        body = decode_body(COMPLETION_DECODER, exchange.request)
        exchange.streaming = bool(body.stream)
        model, served = self._gateway.find(body.model)
        exchange.model = served.names[0]
        requests = completion_requests(body, model)
        options = requests[0].options
        if options.priority or self._caller_limits.needed:
            options = self._caller_limits.apply(options, exchange.request)
            requests = [replace(request, options=options) for request in requests]
        if self._log_prompts:
            prompt_log.info("prompt", extra={"fields": {"prompt": body.prompt}})
        call = partial(_complete_all, served, requests)
        prompt = None
        if options.prompt_logprobs is not None:
            echo = body.logprobs if body.echo else None
            prompt = PromptLogprobsOptions(echo, body.prompt_logprobs)
        writer = self._openai_writer(exchange, COMPLETION_RESPONSE, model, body, prompt)
        return self._generate(exchange, call, writer, options, len(requests))

    def _openai_writer(
        self,
        exchange: Exchange,
        template: ResponseTemplate,
        model: str,
        body: GenerationBody,
        prompt_logprobs: PromptLogprobsOptions | None,
    ) -> OpenAIWriter:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        created = int(self._clock.wall())
        return OpenAIWriter(template, exchange.request_id, model, created, usage, prompt_logprobs)

    async def _generate(
        self,
        exchange: Exchange,
        call: ProcessorCall,
        writer: ItemWriter,
        options: TextOptions,
        prompts: int = 1,
    ) -> HttpReply:
        exchange.request.decoded_body = b""
        deadlines, limit = self.deadlines, self.concurrency[exchange.model]
        metrics = self._metrics.for_model(exchange.model)
        usage_counter, started = UsageCounter(options.n), self._clock.now()
        timing = TokenTiming(metrics, self._clock.now, started, options.n * prompts)
        reply_type: type[HttpReply] = StreamReply if exchange.streaming else UnaryReply
        if options.count_tokens:
            reply_type = CountedStreamReply
        reply = reply_type(exchange, writer, usage_counter, timing, prompts)
        reply.hold_s = self._hold_s
        deadline = deadlines.start(started, exchange.request.headers)
        if self.stories is not None:
            self.stories.begin(exchange, started, options, prompts)
        try:
            if not limit.try_acquire():
                reply.accepted = True
                await limit.acquire()
                if (story := exchange.story) is not None:
                    story.limit_s, story.waited_for = self._clock.now() - started, "limit"
            try:
                if exchange.request.is_large:
                    await exchange.request.pause()
                left_s = deadline.expires_at - self._clock.now()
                context = _make_context(exchange, left_s, passes_key=self._passes_key)
                answer = call(context, reply)
                del call  # frees the conversation while it is answered
                await answer
            finally:
                limit.release()
            reply.check_complete()
            return reply
        except asyncio.CancelledError:
            deadline.raise_if_expired()
            raise
        finally:
            exchange.output.on_silence = None
            deadlines.stop(deadline)
            end, missing = self._clock.now(), reply.remaining_choices
            tokens = _record_metrics(metrics, usage_counter, timing, missing, end - started)
            if self.stories is not None:
                self.stories.end(exchange, usage_counter, timing, tokens, missing, end)

    @contextmanager
    def hold_story(self, exchange: Exchange, *, begins: bool = False) -> Iterator[None]:
        """Let the story of a request last until the block ends, also after its text. `begins`: it
        generates no text, and its story begins now."""
        exchange.holds_story = True
        if begins and self.stories is not None:
            self.stories.begin(exchange, self._clock.now())
        try:
            yield
        finally:
            if exchange.story is not None and self.stories is not None:
                self.stories.tell(exchange.story, self._clock.now())

    @asynccontextmanager
    async def open_context(self, exchange: Exchange, model: str) -> AsyncIterator[Context]:
        """Hold a slot of a model for a request that generates no text or waits for the model, until
        its deadline. Yields its context. Raises `Overloaded`, `DeadlineExceeded` and
        `InvalidRequest`."""
        deadlines = self.deadlines
        deadline = deadlines.start(self._clock.now(), exchange.request.headers)
        try:
            async with self.concurrency[model].slot():
                remaining_s = deadline.expires_at - self._clock.now()
                yield _make_context(exchange, remaining_s, passes_key=self._passes_key)
        except asyncio.CancelledError:
            deadline.raise_if_expired()
            raise
        finally:
            deadlines.stop(deadline)


def _make_context(exchange: Exchange, timeout_s: float, *, passes_key: bool) -> Context:
    headers, trace, header = exchange.request.headers, exchange.trace, ""
    labels = headers.get(LABELS_HEADER, b"").decode("latin-1")
    if labels:
        check_size(LABELS_HEADER.decode(), len(labels), MAX_NAME_BYTES, "bytes")
    metadata = {LABELS_KEY: labels} if labels else {}
    if trace is not None:
        header = trace.header
        if trace.state:
            metadata[TRACESTATE] = trace.state
    context = Context(exchange.request_id, timeout_s=timeout_s, trace=header, metadata=metadata)
    if not passes_key:
        return context
    return replace(context, api_key=caller_key(exchange.request))


def _record_metrics(
    metrics: ModelMetrics,
    usage: UsageCounter,
    timing: TokenTiming,
    remaining_choices: int,
    duration_s: float,
) -> int:
    """Record one request, and return its output tokens. Choices that did not end have no token
    counts, only texts."""
    metrics.duration.observe(duration_s)
    timing.flush()
    if not usage.prompt_tokens:
        return 0
    if usage.cached_tokens:
        metrics.cached_tokens.inc(usage.cached_tokens)
    metrics.input_length.observe(usage.prompt_tokens)
    tokens = usage.completion_tokens
    if remaining_choices:
        tokens = max(tokens, timing.recorded_texts)
    metrics.output_length.observe(tokens)
    return tokens


async def _complete_all(
    served: ServedModel, requests: list[CompletionRequest], context: Context, reply: TextReply
) -> None:
    """Answer all prompts. Every prompt is encoded and checked before the first one is sent."""
    processor = served.processor
    if len(requests) == 1:
        await processor.complete(requests[0], context, reply)
        return
    per_prompt = requests[0].options.n
    prepared: dict[int, Callable[[], Awaitable[None]]] = {}

    async def prepare(index: int, request: CompletionRequest) -> None:
        part_context = replace(context, request_id=f"{context.request_id}.{index}")
        part_reply = OffsetReply(reply, index * per_prompt)
        prepared[index] = await processor.prepare_completion(request, part_context, part_reply)

    work = (prepare(index, request) for index, request in enumerate(requests))
    await run_in_slices(work, PROMPTS_PER_SLICE)
    sends = (prepared[index] for index in range(len(requests)))
    await run_in_slices(map(_send, sends), PROMPTS_PER_SLICE)


async def _send(send: Callable[[], Awaitable[None]]) -> None:
    await send()
