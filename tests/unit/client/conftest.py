"""A scripted HTTP server, and both clients under one interface."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo_client import DynamoClient, DynamoConfig, SyncDynamoClient
from dynamo_client.aio import AsyncNetworkBackend
from dynamo_client.network import BlockingNetworkBackend
from dynamo_client.session import ClientSession

RESET = object()
CLOSE = object()
HOLD = object()
"""Send nothing more until the client disconnects."""
Step = Any


def reply(status: int, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(data)}", "x-request-id: r1", *headers]
    return "\r\n".join((*lines, "", "")).encode() + data


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"x-request-id: r1\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return b"data: " + data + b"\n\n"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def stream(*parts: bytes) -> bytes:
    """A whole streamed reply; every part is a chunk."""
    chunks = b"".join(map(chunk, (*parts, event(b"[DONE]"))))
    return STREAM_HEAD + chunks + LAST_CHUNK


class ScriptedServer:
    """Answers each request by the next entry of `script`: bytes, RESET, CLOSE or HOLD."""

    def __init__(self) -> None:
        self.script: deque[tuple[Step, ...]] = deque()
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.disconnected = asyncio.Event()
        self.url = ""
        self._writers: list[asyncio.StreamWriter] = []

    def add_answers(self, *answers: Step | tuple[Step, ...]) -> None:
        self.script.extend(item if isinstance(item, tuple) else (item,) for item in answers)

    async def start(self, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        self.disconnected.set()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = {"line": head[0], "headers": headers, "connection": self.connections}
        self.requests.append(request | {"body": json.loads(body) if body else None})
        for step in self.script.popleft():
            if step is RESET:
                writer.transport.abort()
                return False
            if step is CLOSE:
                return False
            if step is HOLD:
                await reader.read()
                return False
            writer.write(step)
            await writer.drain()
            await asyncio.sleep(0)
        return True

    async def stop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    )
    arguments = [
        *command.split(),
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        cert,
        "-keyout",
        key,
    ]
    subprocess.run(arguments, check=True, capture_output=True)
    return cert, key


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[ScriptedServer]:
    """A scripted server, with TLS if the test uses the fixture `certificate`."""
    scripted, tls = ScriptedServer(), None
    if "certificate" in request.fixturenames:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*request.getfixturevalue("certificate"))
    listening = await scripted.start(tls)
    yield scripted
    listening.close()
    await scripted.stop()
    await listening.wait_closed()


class RecordingAsyncNetwork(AsyncNetworkBackend):
    """Records the pauses and does not sleep."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class RecordingBlockingNetwork(BlockingNetworkBackend):
    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class EitherClient:
    """Calls the methods of either client; the blocking client runs on a thread."""

    def __init__(self, kind: str, config: DynamoConfig) -> None:
        self.network: RecordingAsyncNetwork | RecordingBlockingNetwork
        if kind == "async":
            self.network = RecordingAsyncNetwork()
            self._async: DynamoClient | None = DynamoClient(config)
            self._async._session = ClientSession(config, self.network)
        else:
            self.network = RecordingBlockingNetwork()
            self._async = None
            self._sync = SyncDynamoClient(config)
            self._sync._session = ClientSession(config, self.network)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._async is not None:
            return await getattr(self._async, name)(*args, **kwargs)
        return await asyncio.to_thread(getattr(self._sync, name), *args, **kwargs)

    async def texts(self, into: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Return the deltas of a streamed chat, and add them to `into` as they arrive."""
        texts = [] if into is None else into
        if self._async is not None:
            async for chunk in await self._async.chat_completion([], stream=True, **kwargs):
                texts.append(chunk["choices"][0]["delta"]["content"])
        else:
            await asyncio.to_thread(self._read, texts, kwargs)
        return texts

    def _read(self, texts: list[str], kwargs: dict[str, Any]) -> None:
        chunks = self._sync.chat_completion([], stream=True, **kwargs)
        texts.extend(chunk["choices"][0]["delta"]["content"] for chunk in chunks)

    async def close(self) -> None:
        await self.call("close")


class ScriptParts:
    """The parts of a script for `ScriptedServer.add_answers`."""

    RESET, CLOSE, HOLD = RESET, CLOSE, HOLD
    STREAM_HEAD, LAST_CHUNK = STREAM_HEAD, LAST_CHUNK
    reply, chunk, event, delta, stream = map(staticmethod, (reply, chunk, event, delta, stream))


@pytest.fixture
def parts() -> type[ScriptParts]:
    return ScriptParts


@pytest.fixture(params=["async", "sync"])
async def make_client(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[Any]:
    """`make_client(**config)` returns a client of `server`."""
    clients: list[EitherClient] = []

    def create(**config: Any) -> EitherClient:
        clients.append(EitherClient(request.param, DynamoConfig(server.url, **config)))
        return clients[-1]

    yield create
    for client in clients:
        await client.close()
