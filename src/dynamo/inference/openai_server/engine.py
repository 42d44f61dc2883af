"""The engine that is another server, reached by its OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.communication.http.client import HttpClient
from dynamo.communication.options import TlsFiles
from dynamo.communication.tls import client_tls_context
from dynamo.core.clock import Clock
from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    WorkerFailed,
)
from dynamo.core.reply import Engine, KvEventListener, Reply
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import EngineInfo, EngineTotals, GenerateRequest, KvEvent, Load
from dynamo.inference.engines.prompt_check import check_prompt
from dynamo.inference.external import EngineKvView, KvEventEndpoint
from dynamo.inference.openai_server.completion import (
    FEATURES,
    GIVES_IDS,
    CompletionAnswer,
    check_answer,
    completion_body,
)
from dynamo.inference.openai_server.llamacpp_answer import LlamaCppAnswer, llamacpp_body
from dynamo.inference.openai_server.server_facts import (
    PROBE_TEXT,
    ServerFacts,
    check_tokenizer,
    read_facts,
    read_model,
)

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs
    from dynamo.models.tokenization.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RETRY_S = 1.0
HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
MAX_HEALTH_FAILURES = 3
MODEL_CHECK_EVERY = 5
"""A health check of so many also asks for the model's name."""
DEFAULT_MAX_NUM_SEQS = 256

Answer = CompletionAnswer | LlamaCppAnswer


class OpenAIServerEngine(Engine):
    """Answers by the completions of one server, with token ids as prompts.

    A server that dies, hangs, or changes its model is a failure of the engine: the worker leaves,
    and the one that replaces it waits until the server answers again.
    """

    def __init__(
        self,
        http: HttpClient,
        load_tokenizer: Callable[[], Tokenizer],
        clock: Clock,
        *,
        model: str = "",
        block_tokens: int = 16,
        context_tokens: int = 0,
        max_num_seqs: int = 0,
        vocab_size: int = 0,
        kv_events: KvEventEndpoint | None = None,
    ) -> None:
        """`model`: its name at the server, if that has several. `kv_events`: where the server
        publishes the blocks of its cache, as vLLM and SGLang do."""
        self._http = http
        self._load_tokenizer = load_tokenizer
        self._clock = clock
        self._model = model
        self._block_tokens = block_tokens
        self._context_tokens = context_tokens
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._view = EngineKvView(block_tokens, endpoint=kv_events) if kv_events else None
        self._tasks = BackgroundTasks()
        self._answers: set[Answer] = set()
        self._listeners: list[Callable[[], None]] = []
        self._totals = EngineTotals()
        self._facts: ServerFacts | None = None

    async def start(self) -> EngineInfo:
        tokenizer = await self._clock.offload(self._load_tokenizer)
        facts = self._facts = await self._wait_for_server(unpack_ids(tokenizer.encode(PROBE_TEXT)))
        if facts.kind not in GIVES_IDS | {"llamacpp"}:
            _check_text_round_trip(tokenizer, self._http.url)
        self._encode = partial(_encode_text, tokenizer)
        if facts.context_tokens:
            self._context_tokens = min(
                self._context_tokens or facts.context_tokens, facts.context_tokens
            )
        if self._view is not None:
            self._view.open()
        self._tasks.start(self._watch(), "health of a server")
        fields = {"url": self._http.url, "kind": facts.kind, "model": facts.model.id}
        log.info("a server is connected", extra={"fields": fields})
        return EngineInfo(
            engine=f"openai:{facts.kind}",
            block_tokens=self._block_tokens,
            num_blocks=0,
            context_tokens=self._context_tokens,
            max_num_seqs=self._max_num_seqs or facts.slots or DEFAULT_MAX_NUM_SEQS,
            max_num_batched_tokens=self._context_tokens,
            vocab_size=self._vocab_size,
            kv_events=self._view is not None,
            features=FEATURES[facts.kind],
        )

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        if self.failure is not None or self._facts is None:
            raise self._failure_or("the engine is not started")
        prompt = self._check_prompt(request)
        answer, body = self._open_answer(request, prompt, reply)
        self._answers.add(answer)
        drift = self._view.drift if self._view is not None else None
        prediction = drift.on_submitted(request.token_ids, request.salt) if drift else None
        try:
            if context.attempt:
                answer.begin(cached_tokens=0)
            check_answer(
                await self._http.send(
                    "POST", "/v1/completions", msgspec.json.encode(body), answer.on_data
                )
            )
            if not answer.ended:
                raise WorkerFailed(f"{self._http.url} ended an answer before it was complete")
        except OSError as error:
            if not answer.ended:
                raise self._failure_or(f"{self._http.url}: {error}") from error
        finally:
            self._answers.discard(answer)
            if drift is not None and prediction is not None:
                drift.on_ended(prediction, answer.cached_tokens)

    def report_load(self) -> Load:
        waiting = sum(not answer.tokens_delivered for answer in self._answers)
        return Load(
            running=len(self._answers) - waiting,
            waiting=waiting,
            prefill_tokens=sum(answer.prefill_tokens for answer in self._answers),
            steps=self._totals.steps,
        )

    def on_kv_events(self, listener: KvEventListener) -> None:
        if self._view is not None:
            self._view.on_kv_events(listener)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        return () if self._view is None else self._view.snapshot()

    @property
    def kv_problem(self) -> str:
        return "" if self._view is None else self._view.problem

    @property
    def kv_counts(self) -> Mapping[tuple[str, str], int]:
        return {} if self._view is None else self._view.counts

    def on_failure(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def totals(self) -> EngineTotals:
        return self._totals

    async def stop(self) -> None:
        self.failure = self.failure or WorkerFailed("the engine was stopped")
        await self._tasks.close()
        if self._view is not None:
            await self._view.close()
        self._http.close()

    def _open_answer(
        self, request: GenerateRequest, prompt: Sequence[int], reply: Reply
    ) -> tuple[Answer, dict[str, Any]]:
        facts = self._facts
        if facts is not None and facts.kind == "llamacpp":
            body = llamacpp_body(request, prompt, self._context_tokens, facts)
            return LlamaCppAnswer(prompt, request, reply, self._totals), body
        assert facts is not None  # noqa: S101 - generate has checked it
        encode = None if facts.kind in GIVES_IDS else self._encode
        answer = CompletionAnswer(request, len(prompt), reply, self._totals, encode)
        return answer, completion_body(request, prompt, facts)

    def _check_prompt(self, request: GenerateRequest) -> tuple[int, ...]:
        prompt = unpack_ids(request.token_ids)
        check_prompt(prompt, self._context_tokens, self._vocab_size)
        return prompt

    async def _wait_for_server(self, probe_ids: Sequence[int]) -> ServerFacts:
        """Return what the server says as soon as it answers. `probe_ids` are those of `PROBE_TEXT`.
        Raises `ConfigError`, and `ModelUnavailable` for another tokenizer."""
        last_reason = ""
        while True:
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    facts = await read_facts(self._http, self._model)
                    if not await check_tokenizer(self._http, facts, probe_ids):
                        fields = {"url": self._http.url, "model": facts.model.id}
                        text = "the server's tokenizer could not be compared"
                        log.warning(text, extra={"fields": fields})
                    return facts
            except (OSError, WorkerFailed) as error:
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
            except ConfigError as error:  # a changed model stays changed
                self._fail(error)
                return
            except (OSError, WorkerFailed) as error:
                failures += 1
                if failures == MAX_HEALTH_FAILURES:
                    reason = str(error) or f"no answer in {HEALTH_TIMEOUT_S:g} s"
                    self._fail(WorkerFailed(f"{self._http.url} is not healthy: {reason}"))
                    return

    async def _check_health(self, *, with_model: bool) -> None:
        assert self._facts is not None  # noqa: S101 - started
        answer = await self._http.send("GET", "/health")
        if answer.status not in {200, 404}:
            raise WorkerFailed(f"/health answers {answer.status}")
        if with_model or answer.status == 404:
            model, expected = await read_model(self._http, self._model), self._facts.model
            if (model.id, model.root) != (expected.id, expected.root):
                raise ConfigError(
                    f"{self._http.url} has changed its model from {expected.id} to {model.id}",
                    hint="remove the server, or start it with the former model",
                )

    def _failure_or(self, message: str) -> WorkerFailed:
        """Return a new error: the engine's failure, or `message` if it has none."""
        if self.failure is None:
            return WorkerFailed(message)
        return WorkerFailed(self.failure.message, hint=self.failure.hint)

    def _fail(self, error: DynamoError) -> None:
        log.error("a server is given up", extra={"fields": {"reason": error.message}})
        self.failure = WorkerFailed(error.message, hint=error.hint)
        self._http.close()
        for listener in self._listeners:
            listener()


def _encode_text(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return unpack_ids(tokenizer.encode(text, parse_special=False))


def _check_text_round_trip(tokenizer: Tokenizer, url: str) -> None:
    """Raise `ConfigError` if pieces of text do not survive their tokens one by one."""
    for text in (" a", "a", "\n", "  b", "犬"):
        if tokenizer.decode(_encode_text(tokenizer, text)) != text:
            raise ConfigError(
                f"{url} sends text without token ids, and the tokenizer changes {text!r}",
                hint="use a server that sends token ids: vLLM, SGLang or llama.cpp",
            )


def parse_kv_events(text: str) -> KvEventEndpoint:
    """Return the endpoint of `tcp://HOST:PORT` or `tcp://HOST:PORT/REPLAY_PORT`. Raises
    `ConfigError`."""
    match = re.fullmatch(r"(tcp://[^/]+):(\d+)(?:/(\d+))?", text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no address of KV events",
            hint="e.g. tcp://10.0.0.5:5557, or with the port of its replays tcp://10.0.0.5:5557/5558",
        )
    host, port, replay = match.groups()
    return KvEventEndpoint(f"{host}:{port}", f"{host}:{replay}" if replay else "")


async def open_engine(inputs: EngineInputs) -> OpenAIServerEngine:
    """Create the engine for the first of the settings' URLs. Raises `ConfigError`."""
    from dynamo.models.tokenization.tokenizer import load_tokenizer

    settings, card = inputs.settings.engine, inputs.card
    if not settings.urls:
        raise ConfigError("out=openai needs a URL", hint="dynamo run out=openai http://HOST:PORT")
    (url, *_) = settings.urls
    tls: ssl.SSLContext | None = None
    if url.startswith("https:"):
        tls = await inputs.clock.offload(client_tls_context, TlsFiles(ca=settings.url_ca))
    headers = {"authorization": f"Bearer {settings.url_key}"} if settings.url_key else {}
    return OpenAIServerEngine(
        HttpClient(url, headers, tls),
        partial(load_tokenizer, card.tokenizer),
        inputs.clock,
        model=settings.url_model,
        block_tokens=settings.block_size,
        context_tokens=card.context_tokens,
        max_num_seqs=settings.max_num_seqs,
        vocab_size=card.vocab_size,
        kv_events=parse_kv_events(settings.url_kv_events[0]) if settings.url_kv_events else None,
    )
