"""A server with an OpenAI API that answers as a test says, and an engine for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.openai_server.engine import OpenAIServerEngine
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer

KEY = "a-key-of-llama-cpp"
PROMPT = tuple(range(300, 340))


def make_engine(
    url: str, folder: Path | None = None, *, key: str = KEY, model: str = "", **options: Any
) -> OpenAIServerEngine:
    files = resolve_model_blocking(str(folder or ""), ensure_verified=False)
    return OpenAIServerEngine(
        HttpClient(url, {"authorization": f"Bearer {key}"} if key else {}, None),
        lambda: load_tokenizer(files.tokenizer),
        SystemClock(),
        EngineSettings(url_model=model),
        vocab_size=files.metadata.vocab_size,
        **options,
    )


def request(tokens: int = 5) -> GenerateRequest:
    stops = StopConditions(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest("r", "m", pack_ids(PROMPT), SamplingParams(temperature=0), stops)


class FakeServer:
    """A server that answers each path with a status, headers and a body, which tests change."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str, bytes]] = {
            "/health": (200, "", b""),
            "/v1/models": (200, "", models("m")),
        }
        self.requests: list[str] = []
        """The paths of all requests."""
        self.bodies: list[bytes] = []
        self.headers: list[bytes] = []
        """The header lines of all requests."""
        self.hangs = False
        self.breaks_off = False
        self.missing_bytes = 0
        """So many bytes of the announced bodies never come."""
        self.hanging_path = ""
        self.url = ""
        self.writers: list[asyncio.StreamWriter] = []

    async def close_connections(self) -> None:
        """Close all connections and wait until they are closed."""
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()) not in {b"\r\n", b""}:
                    self.headers.append(header)
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                self.bodies.append(await reader.readexactly(length))
                self.requests.append(line.split()[1].decode())
                if self.hangs or self.requests[-1] == self.hanging_path:
                    await reader.read()
                missing = (404, "", b"not found")
                status, headers, body = self.answers.get(line.split()[1].decode(), missing)
                size = len(body) + (100 if self.breaks_off else self.missing_bytes)
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {size}\r\n{headers}\r\n"
                writer.write(head.encode() + body)
                if self.breaks_off:
                    break
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def models(name: str) -> bytes:
    entry = {"id": name, "root": name, "owned_by": "vllm", "max_model_len": 512}
    return json.dumps({"data": [entry]}).encode()


def events(*values: object) -> bytes:
    return b"".join(b"data: %s\r\n\r\n" % json.dumps(value).encode() for value in values)


@asynccontextmanager
async def served() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        await fake.close_connections()


@asynccontextmanager
async def engine_at(fake: FakeServer, tiny_model: Path) -> AsyncIterator[OpenAIServerEngine]:
    engine = make_engine(fake.url, tiny_model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def chunk(ids: list[int], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "x", "token_ids": ids, "finish_reason": reason}]}
