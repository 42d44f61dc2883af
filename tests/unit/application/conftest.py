"""The complete HTTP application over a processor that echoes words, each as one delta."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from dynamo.application import Application, Gateway, ServedModel
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, NoWorkers, WorkerFailed
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.text import (
    ChatRequest,
    CompletionRequest,
    DecodedTokenLogprob,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started
from dynamo.telemetry.metrics import Registry

CONTEXT_TOKENS = 100_000


class WordProcessor:
    """Answers with the words of the prompt, repeated up to `max_tokens`.

    `entered` and `cancelled` are set by requests. A cleared `gate` delays the first text. `fails`
    makes requests fail `before` the first text or `after` two texts. Without `yields`, the loop
    runs only every 64 texts.
    """

    def __init__(self) -> None:
        self.requests: list[ChatRequest | CompletionRequest] = []
        self.contexts: list[Context] = []
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.encoder_free = asyncio.Event()
        self.encoder_free.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.encodes_first = False
        self.fails = ""
        self.yields = True

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        prompt = str(request.messages[-1]["content"])
        words = await self._prepare(request, prompt, context, reply)
        await self._answer(request, words, reply)

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        await (await self.prepare_completion(request, context, reply))()

    async def prepare_completion(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> Callable[[], Awaitable[None]]:
        prompt = request.prompt
        if isinstance(prompt, bytes):
            prompt = " ".join(f"id{token}" for token in memoryview(prompt).cast("I"))
        words = await self._prepare(request, prompt, context, reply)
        return partial(self._answer, request, words, reply)

    async def tokenize(self, prompt: str | ChatRequest, *, add_special: bool = False) -> list[int]:
        text = prompt if isinstance(prompt, str) else str(prompt.messages[-1]["content"])
        if not isinstance(prompt, str):
            self.requests.append(prompt)
        return [1] * add_special + [len(word) for word in text.split()]

    async def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join("x" * token for token in ids)

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        return ["x" * token for token in ids]

    async def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [b"y" * (token - 1) + b"\xc3" * (token % 2) for token in ids]

    async def _prepare(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: str,
        context: Context,
        reply: TextReply,
    ) -> list[str]:
        self.requests.append(request)
        self.contexts.append(context)
        words = [f"{word} " for word in prompt.split()]
        if len(words) > CONTEXT_TOKENS:
            raise ContextLengthExceeded("too long", param="prompt")
        if self.requests[0] is not request or not self.encodes_first:
            await self.encoder_free.wait()
        reply.prompt(len(words))
        return words

    async def _answer(
        self, request: ChatRequest | CompletionRequest, words: list[str], reply: TextReply
    ) -> None:
        self.entered.set()
        try:
            await self.gate.wait()
            if self.fails == "before":
                raise NoWorkers("no worker serves this model")
            for choice in range(request.options.n):
                reply.begin(choice, Started("w1", cached_tokens=1, prompt_tokens=len(words)))
            await self._generate(request, words, reply)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _generate(
        self, request: ChatRequest | CompletionRequest, words: list[str], reply: TextReply
    ) -> None:
        options = request.options
        if options.max_tokens == 0:  # the request asks only for an echo
            for choice in range(options.n):
                reply.text(choice, "".join(words))
                reply.finish(choice, TextFinish("length", 0))
            return
        count = options.max_tokens or len(words)
        offset = 0
        for number in range(count):
            if self.fails == "after" and number == 2:
                raise WorkerFailed("the worker died")
            word = words[number % len(words)]
            logprobs = (
                None if options.top_logprobs is None else [self._token(word, options, offset)]
            )
            offset += len(word)
            for choice in range(options.n):
                if not reply.text(choice, word, logprobs):
                    return
            if self.yields or number % 64 == 0:
                await asyncio.sleep(0)
        for choice in range(options.n):
            reply.finish(choice, TextFinish("length", count))

    @staticmethod
    def _token(word: str, options: Any, offset: int) -> DecodedTokenLogprob:
        raw = word.encode()
        top = tuple((word + str(n), raw, -float(n)) for n in range(options.top_logprobs))
        return DecodedTokenLogprob(word, raw, -0.5, top, offset)


class Site:
    """A running HTTP server with its application, gateway and processor."""

    def __init__(
        self, application: Application, gateway: Gateway, port: int, http: HttpServer
    ) -> None:
        self.application = application
        self.http = http
        self.gateway = gateway
        self.port = port
        self.processor = WordProcessor()
        self.url = f"http://127.0.0.1:{port}"

    def add(self, *names: str) -> None:
        served = ServedModel(names, self.processor, 1_700_000_000, CONTEXT_TOKENS, eos_token="</s>")
        self.gateway.add(served)


Open = Callable[..., Awaitable[Site]]


@pytest.fixture
async def open_site() -> AsyncIterator[Open]:
    """`site = await open_site(**server_settings)` serves the model "words", alias "spoken".

    `metrics_source` stands for the metrics of other processes, `adapter_orders` for the workers.
    """
    running: list[tuple[HttpServer, Application]] = []

    async def start(
        *,
        empty: bool = False,
        metrics_source: Any = None,
        adapter_orders: Any = None,
        clock: Clock | None = None,
        ttft_slo: float = 0.0,
        **settings: Any,
    ) -> Site:
        server = ServerSettings(**settings)
        gateway, registry = Gateway(), Registry()
        clock = clock or SystemClock()
        application = Application(
            server,
            gateway,
            clock,
            registry,
            metrics_source=metrics_source,
            adapter_orders=adapter_orders,
        )
        application.update_settings(server, ttft_slo)
        http = HttpServer(
            application.handle,
            HttpLimits.from_settings(server),
            clock,
            on_error=application.on_error,
            check_headers=application.check_headers,
        )
        site = Site(application, gateway, await http.start("127.0.0.1", 0), http)
        running.append((http, application))
        if not empty:
            site.add("words", "spoken")
        return site

    yield start
    for http, application in running:
        await http.stop(0)
        application.generation.deadlines.close()


@pytest.fixture
async def site(open_site: Open) -> Site:
    return await open_site()
