"""The engine that is another server, reached by its OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import msgspec

from dynamo.communication.http.client import CONNECT_TIMEOUT_S, HttpClient
from dynamo.core.clock import Clock
from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    Forbidden,
    NotFound,
    Overloaded,
    Unauthorized,
    UpstreamFailed,
    WorkerFailed,
)
from dynamo.core.redaction import redact
from dynamo.core.reply import Engine, Reply
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, Load
from dynamo.inference.engines.answer import check_prompt
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING
from dynamo.inference.engines.event_reader import KvEventEndpoint
from dynamo.inference.engines.rank import ForeignRank, ViewedRank
from dynamo.inference.openai_server.completion import (
    FEATURES,
    GIVES_IDS,
    CompletionAnswer,
    completion_body,
)
from dynamo.inference.openai_server.llamacpp_answer import LlamaCppAnswer, llamacpp_body
from dynamo.inference.openai_server.server_errors import check_answer
from dynamo.inference.openai_server.server_facts import (
    KEY_HINT,
    PROBE_TEXT,
    ServerFacts,
    check_tokenizer,
    read_facts,
    read_model,
)
from dynamo.inference.openai_server.streamed_answer import StreamedAnswer
from dynamo.inference.openai_server.text_answer import (
    COMPLETION_PATH,
    TextAnswer,
    text_body,
    text_features,
    text_path,
)
from dynamo.telemetry.trace_context import exports_traces, trace_headers

if TYPE_CHECKING:
    from dynamo.models.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RETRY_S = 1.0
HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
MAX_HEALTH_FAILURES = 3
MODEL_CHECK_EVERY = 5
"""A health check of so many also asks for the model's name."""
DEFAULT_MAX_NUM_SEQS = 256
FIRST_PART_TIMEOUT_S = 600.0
"""An answer of a healthy server may begin so late."""
LOADING_TIMEOUT_S = 120.0
"""A server without a list of models may be loading its model for so long."""


class OpenAIServerEngine(Engine):
    """Answers by the completions of one server, with token ids as prompts. Without a tokenizer,
    conversations go to the server as they are, and text comes back.

    A server that dies, hangs, or changes its model is a failure of the engine: the worker leaves,
    and the one that replaces it waits until the server answers again.
    """

    def __init__(
        self,
        http: HttpClient,
        load_tokenizer: Callable[[], Tokenizer] | None,
        clock: Clock,
        settings: EngineSettings = EngineSettings(),  # noqa: B008 - is frozen
        *,
        context_tokens: int = 0,
        vocab_size: int = 0,
        kv_events: KvEventEndpoint | None = None,
        generation: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`kv_events`: where the server publishes the blocks of its cache, as vLLM and SGLang do.
        `generation`: the model's own defaults of sampling."""
        self._http = http
        self._load_tokenizer = load_tokenizer
        self._clock = clock
        self._settings = settings
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._generation = generation
        self._exported = exports_traces(os.environ)
        self._rank = (
            ViewedRank(settings.block_size, endpoint=kv_events) if kv_events else ForeignRank()
        )
        self._tasks = BackgroundTasks()
        self._listeners: list[Callable[[], None]] = []
        self._totals = EngineTotals()
        self._facts: ServerFacts | None = None

    async def start(self) -> EngineInfo:
        facts = await self.connect()
        if facts.context_tokens:
            self._context_tokens = min(
                self._context_tokens or facts.context_tokens, facts.context_tokens
            )
        if isinstance(self._rank, ViewedRank):
            self._rank.open()
        self._tasks.start(self._watch(), "health of a server")
        fields = {"url": self._http.url, "kind": facts.kind, "model": facts.model.id}
        log.info("a server is connected", extra={"fields": fields})
        return EngineInfo(
            engine=f"openai:{facts.kind}",
            block_tokens=self._settings.block_size,
            num_blocks=0,
            context_tokens=self._context_tokens,
            max_num_seqs=self._settings.max_num_seqs or facts.slots or DEFAULT_MAX_NUM_SEQS,
            max_num_batched_tokens=self._context_tokens,
            vocab_size=self._vocab_size,
            kv_events=isinstance(self._rank, ViewedRank),
            features=(FEATURES[facts.kind] if self._load_tokenizer else text_features(facts.kind)),
            sampling={} if facts.kind == "dynamo" else {**NEUTRAL_SAMPLING, **self._generation},
        )

    async def connect(self) -> ServerFacts:
        """Wait until the server answers, and return what it says of itself. Raises as `start`."""
        if self._facts is not None:
            return self._facts
        if self._load_tokenizer is None:
            self._facts = await self._wait_for_server(None)
            return self._facts
        tokenizer = await self._clock.offload(self._load_tokenizer)
        facts = await self._wait_for_server(unpack_ids(tokenizer.encode(PROBE_TEXT)))
        if facts.kind not in GIVES_IDS | {"llamacpp"}:
            _check_text_round_trip(tokenizer, self._http.url)
        self._encode = partial(_encode_text, tokenizer)
        self._facts = facts
        return facts

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None or self._facts is None:
            raise self._failure_or("the engine is not started")
        path, body, answer = self._open_answer(request, reply, self._facts)
        self._rank.enter(answer)
        try:
            if context.attempt:
                answer.begin()
            async with asyncio.timeout(None) as time_limit:
                answer.time_limit = time_limit
                check_answer(
                    await self._http.send(
                        "POST",
                        path,
                        body,
                        answer.on_data,
                        authorization=f"Bearer {context.api_key}" if context.api_key else "",
                        headers=trace_headers(context, request.choice, exported=self._exported),
                    )
                )
            answer.end()
        except DynamoError as error:
            where = f"{self._http.url}: " if isinstance(error, UpstreamFailed) else ""
            error.reason = redact(where + error.reason, context.api_key)
            if isinstance(error, Unauthorized | Forbidden):
                raise self._refused_key(error, context) from None
            raise
        except OSError as error:
            if not answer.end_if_complete():
                text = str(error) or f"no answer in {CONNECT_TIMEOUT_S:g} s"
                raise self._failure_or(f"{self._http.url}: {text}") from error
        finally:
            self._rank.leave(answer)

    async def prove_progress(self, canary: GenerateRequest, context: Context, reply: Reply) -> None:
        """Ask the server for its health, where a token costs money or cannot be asked for. A server
        that limits the rate of requests is alive."""
        facts = self._facts
        takes_canary = self._load_tokenizer is not None and facts and facts.kind != "openai"
        with suppress(Overloaded):
            if takes_canary or self.failure is not None:
                await self.generate(canary, context, reply)
                return
            try:
                await self._check_health(with_model=False)
            except OSError as error:
                raise self._failure_or(f"{self._http.url}: {error}") from error

    def report_load(self) -> Load:
        self._rank.steps = self._totals.steps
        return self._rank.report_load()

    @property
    def ranks(self) -> Sequence[ForeignRank]:
        return (self._rank,)

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def totals(self) -> EngineTotals:
        return self._totals

    async def stop(self) -> None:
        self.failure = self.failure or WorkerFailed("the engine was stopped")
        await self._tasks.close()
        if isinstance(self._rank, ViewedRank):
            await self._rank.close()
        self._http.close()

    def _open_answer(
        self, request: GenerateRequest, reply: Reply, facts: ServerFacts
    ) -> tuple[str, bytes, StreamedAnswer]:
        """Return path and body of a request, and its answer. Raises `InvalidRequest` and
        `Unsupported`."""
        answer: StreamedAnswer
        if request.text is not None:
            body = text_body(request, facts)
            answer = TextAnswer(request, self._context_tokens, reply, self._totals, self._clock)
            return text_path(request), body, answer
        prompt = unpack_ids(request.token_ids)
        check_prompt(prompt, self._context_tokens, self._vocab_size)
        if facts.kind == "llamacpp":
            fields = llamacpp_body(request, prompt, self._context_tokens, facts)
            answer = LlamaCppAnswer(request, reply, self._totals, self._clock)
        else:
            encode = None if facts.kind in GIVES_IDS else self._encode
            fields = completion_body(request, prompt, facts)
            answer = CompletionAnswer(
                request,
                reply,
                self._totals,
                self._clock,
                vocab_size=self._vocab_size,
                encode=encode,
            )
        return COMPLETION_PATH, msgspec.json.encode(fields), answer

    async def _wait_for_server(self, probe_ids: Sequence[int] | None) -> ServerFacts:
        """Return what the server says as soon as it answers. `probe_ids` are those of `PROBE_TEXT`,
        None without a tokenizer. Raises `ConfigError`, and `ModelUnavailable` for another
        tokenizer."""
        last_reason, began_s = "", self._clock.now()
        while True:
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    facts = await read_facts(self._http, self._settings.url_model)
                    if probe_ids is not None and not await check_tokenizer(
                        self._http, facts, probe_ids
                    ):
                        fields = {"url": self._http.url, "model": facts.model.id}
                        text = "the server's tokenizer could not be compared"
                        log.warning(text, extra={"fields": fields})
                    return facts
            except (OSError, WorkerFailed, Overloaded, NotFound) as error:
                waited_s = self._clock.now() - began_s
                if isinstance(error, NotFound) and waited_s >= LOADING_TIMEOUT_S:
                    raise ConfigError(error.message, hint=error.hint) from None
                reason = str(error) or type(error).__name__
                if reason != last_reason:
                    last_reason = reason
                    fields = {"url": self._http.url, "reason": reason}
                    log.warning("waiting for a server", extra={"fields": fields})
            await self._clock.sleep(RETRY_S)

    async def _watch(self) -> None:
        """Ask for the server's health until it fails."""
        failures = checks = 0
        while True:
            await self._clock.sleep(HEALTH_INTERVAL_S)
            checks += 1
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self._check_health(with_model=checks % MODEL_CHECK_EVERY == 0)
                failures = 0
                self._count_silent_step()
            except Overloaded:  # a server that limits the rate of requests is alive
                failures = 0
            except ConfigError as error:  # a changed model stays changed
                self._fail(error)
                return
            except (OSError, WorkerFailed, NotFound) as error:
                failures += 1
                if failures == MAX_HEALTH_FAILURES:
                    reason = str(error) or f"no answer in {HEALTH_TIMEOUT_S:g} s"
                    self._fail(WorkerFailed(f"{self._http.url} is not healthy: {reason}"))
                    return

    def _count_silent_step(self) -> None:
        """Count the health of a server as progress while an answer may not have begun: the server
        may load its model, or compute a long prompt."""
        answers = cast("Iterable[StreamedAnswer]", self._rank.answers)
        newest_s = max((each.sent_s for each in answers if not each.tokens), default=-math.inf)
        if self._clock.now() - newest_s < FIRST_PART_TIMEOUT_S:
            self._totals.steps += 1

    async def _check_health(self, *, with_model: bool) -> None:
        assert self._facts is not None  # noqa: S101 - started
        answer = await self._http.send("GET", "/health")
        if answer.status >= 500:
            raise WorkerFailed(f"/health answers {answer.status}")
        if with_model or answer.status not in {200, 429}:  # a gateway may have no /health
            model = await read_model(self._http, self._settings.url_model)
            expected = self._facts.model
            if (model.id, model.root) != (expected.id, expected.root):
                raise ConfigError(
                    f"{self._http.url} has changed its model from {expected.id} to {model.id}",
                    hint="remove the server, or start it with the former model",
                )

    def _refused_key(self, error: Unauthorized | Forbidden, context: Context) -> DynamoError:
        """Return the error of a request whose key the server refuses. A key of the caller, or a
        missing key, is the caller's error. The deployment's key is a failure of the worker."""
        if context.api_key:
            return error
        if not self._http.has_authorization:
            error.hint = f"send an API key (--pass-api-key), or {KEY_HINT}"
            return error
        text = f"{self._http.url}: {error.message}; it is the deployment's key (engine.url_key)"
        return UpstreamFailed(text, hint=KEY_HINT)

    def _failure_or(self, message: str) -> WorkerFailed:
        """Return a new error: the engine's failure, or `message` if it has none."""
        if self.failure is None:
            return UpstreamFailed(message)
        return WorkerFailed(self.failure.message, hint=self.failure.hint)

    def _fail(self, error: DynamoError) -> None:
        log.error("a server is given up", extra={"fields": {"reason": error.message}})
        self.failure = WorkerFailed(error.message, hint=error.hint)
        self._http.close()
        for listener in self._listeners:
            listener()


def _encode_text(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return unpack_ids(tokenizer.encode_behind_text(text, parse_special=False))


def _check_text_round_trip(tokenizer: Tokenizer, url: str) -> None:
    """Raise `ConfigError` if pieces of text do not survive their tokens one by one."""
    for text in (" a", "a", "\n", "  b", "犬"):
        if tokenizer.decode_behind_text(_encode_text(tokenizer, text)) != text:
            raise ConfigError(
                f"{url} sends text without token ids, and the tokenizer changes {text!r}",
                hint="use a server that sends token ids: vLLM, SGLang or llama.cpp",
            )
