"""Fuzz targets for the HTTP application: mutated bytes of requests, and mutated JSON bodies."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.fuzz.campaign import Target
from tests.fuzz.memory_transport import MemoryTransport
from tests.fuzz.mutations import Mutator
from tests.unit.application.conftest import CONTEXT_TOKENS, WordProcessor

from dynamo.application import Application, Gateway, ServedModel
from dynamo.communication.http import HttpLimits
from dynamo.communication.http.connection import HttpConnection, HttpServerState
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply
from dynamo.telemetry.metrics import Registry

STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")
TURNS = 200
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "words",
            "messages": [
                {"role": "system", "content": "short"},
                {"role": "user", "content": [{"type": "text", "text": "a tale é"}]},
            ],
            "max_tokens": 3,
            "temperature": 0.5,
            "stop": ["x", "y"],
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "words",
            "messages": [{"role": "user", "content": "a b"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 3,
            "logit_bias": {"5": 1},
        },
    ),
    ("/v1/completions", {"model": "words", "prompt": ["a b", "c"], "max_tokens": 2, "echo": True}),
    ("/v1/completions", {"model": "words", "prompt": [[1, 2], [3]], "max_tokens": 2, "seed": 1}),
    ("/tokenize", {"model": "words", "prompt": "a b"}),
    ("/detokenize", {"model": "words", "tokens": [1, 2]}),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.1, -0.0, 1e308, 1e-320),
    *("", "a", "\0", "\ud800", "é" * 50, "x" * 5000, [], {}, [[]], [None], {"": {}}, ["a"] * 3000),
)


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """Encode a POST request."""
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % (path.encode(), len(body))
    return head + b"".join(line + b"\r\n" for line in headers) + b"\r\n" + body


def chunked(path: str, body: bytes) -> bytes:
    """Encode a chunked POST request with a chunk extension and a trailer."""
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
    half = len(body) // 2
    parts = (body[:half], body[half:])
    chunks = b"".join(b"%x;e=1\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return head + chunks + b"0\r\nx: y\r\n\r\n"


class BoundedWordProcessor(WordProcessor):
    """A word processor that forgets earlier requests and never answers with no word."""

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        self.requests.clear()
        self.contexts.clear()
        await super().chat(request, context, reply)

    async def prepare_completion(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> Callable[[], Awaitable[None]]:
        self.requests.clear()
        self.contexts.clear()
        return await super().prepare_completion(request, context, reply)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    async def _generate(
        self, request: ChatRequest | CompletionRequest, words: list[str], reply: TextReply
    ) -> None:
        await super()._generate(request, words or ["mum "], reply)


class ApplicationTarget(Target):
    """The HTTP application without sockets."""

    async def open(self) -> None:
        server, clock, gateway = ServerSettings(header_timeout=1.0), SystemClock(), Gateway()
        gateway.add(ServedModel(("words",), BoundedWordProcessor(), 1_700_000_000, CONTEXT_TOKENS))
        self._app = Application(server, gateway, clock, Registry())
        limits = HttpLimits.from_settings(server)
        self._state = HttpServerState(
            self._app.handle, limits, clock, self._app.on_error, self._app.check_headers
        )

    async def close(self) -> None:
        await self._state.tasks.close()
        self._app.generation.deadlines.close()

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        del data
        answer = await self._exchange(pieces)
        for status in STATUS.findall(answer):
            assert not status.startswith(b"5"), answer[:300]
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:300]

    async def check(self) -> None:
        answer = await self._exchange([post(BODIES[0][0], json.dumps(BODIES[0][1]).encode())])
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:300]

    def open_count(self) -> int:
        return len(self._state.connections) + len(self._state.tasks)

    async def _exchange(self, pieces: Sequence[bytes]) -> bytes:
        """Send `pieces` and return the answer. Waits until the server has dropped the connection."""
        connection = MemoryTransport(HttpConnection(self._state))
        for piece in pieces:
            connection.receive(piece)
            await asyncio.sleep(0)
        for _ in range(TURNS):
            if not self._state.tasks or connection.ended:
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        connection.close()
        while self._state.tasks or self._state.connections:
            await asyncio.sleep(0)
        return bytes(connection.written)


class HttpTarget(ApplicationTarget):
    """Feeds mutated bytes of requests."""

    seeds = (
        b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http://a/v1/models?x=1#y HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"HEAD /metrics HTTP/1.1\r\nhost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"OPTIONS /v1/models HTTP/1.1\r\nhost: a\r\norigin: http://b\r\n\r\n",
        *(post(path, json.dumps(body).encode()) for path, body in BODIES),
        *(chunked(path, json.dumps(body).encode()) for path, body in BODIES[:3]),
        post("/tokenize", b'{"model": "words", "prompt": "a"}', b"expect: 100-continue"),
        post("/v1/chat/completions", b"{}", b"authorization: Bearer x", b"x-request-id: y"),
    )
    words = (
        *(b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"\r\n\r\n", b"0\r\n\r\n", b"HTTP/1.1"),
        *(b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"chunked,", b"%00"),
        *(b"content-length: 5\r\n", b"content-length: -1\r\n", b"content-length: 99999999\r\n"),
        *(b"host: b\r\n", b"expect: x\r\n", b"ffffffffffffffff\r\n", b"\xff", b"%ff%fe", b"/../"),
        b"x: " + b"y" * 40_000 + b"\r\n",
        b"x: y\r\n" * 120,
    )


class JsonTarget(ApplicationTarget):
    """Feeds JSON bodies with mutated bytes, or with odd values in any place."""

    seeds = tuple(json.dumps(body).encode() for _, body in BODIES)
    words = (
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b'"',
            b"\\",
            b"\\ud800",
            b"\\u0000",
            b",",
            b":",
            b"null",
            b"true",
        ),
        *(b"1e999", b"-0", b"NaN", b"9" * 400, b"\xff", b"\xef\xbb\xbf", b'"model":', b"[" * 2000),
        *(b'{"a":' * 2000, b'"n": 1000000', b'"max_tokens": 99999999', b"\xed\xa0\x80"),
    )

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def next(self, mutator: Mutator) -> bytes:
        if self._random.random() < 0.5:
            return mutator.next()
        body = copy.deepcopy(self._random.choice(BODIES)[1])
        for _ in range(self._random.choice((1, 1, 2, 4))):
            self._mutate(body)
        return json.dumps(body).encode()

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        path = self._random.choice(BODIES)[0]
        await super().feed(data, [post(path, data)])

    def _mutate(self, body: Any) -> None:
        """Replace a random value of the body with an odd one."""
        while True:
            keys = list(body) if isinstance(body, dict) else list(range(len(body)))
            if not keys:
                return
            key = self._random.choice(keys)
            inner = body[key]
            if not (isinstance(inner, dict | list) and inner and self._random.random() < 0.7):
                body[key] = copy.deepcopy(self._random.choice(ODD))
                return
            body = inner
