"""Other processes, and a client of raw bytes: what an HTTP library would refuse to send, tests must
be able to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
from tests.unit.processes import Open, Processes

from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings


@pytest.fixture
def process_settings() -> Settings:
    """Those of every process that `open_runtime` begins."""
    return Settings(runtime=RuntimeSettings(drain_s=5.0))


@pytest.fixture
async def open_runtime(process_settings: Settings) -> AsyncIterator[Open]:
    """`await open_runtime()`: a runtime like another process's, on one memory network."""
    processes = Processes(settings=process_settings)
    yield processes.open
    await processes.close()


class RawAnswer:
    """One response: status, headers (lower case), body with chunks joined, and the chunks."""

    def __init__(self, status: int, headers: dict[str, str], chunks: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.chunks = chunks
        self.body = b"".join(chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(found) == {"message", "type", "code", "param", "hint", "request_id"}
        assert found["message"]
        return found

    @property
    def events(self) -> list[Any]:
        """JSON of every server-sent event; `[DONE]` as it is."""
        lines = self.body.decode().split("\n\n")
        assert lines[-1] == ""
        data = [line.removeprefix("data: ") for line in lines[:-1]]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


class RawConnection:
    """Bytes out, responses in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Write one well-formed request; `body` is bytes or JSON."""
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        lines = {"host": "test", "content-length": str(len(data))} | (headers or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode(), data)

    async def answer(self, *, bodiless: bool = False) -> RawAnswer:
        """Read one response. Raises IncompleteReadError where it is cut short."""
        status, headers = await self.head()
        if bodiless or status in (204, 304):
            return RawAnswer(status, headers, [])
        if headers.get("transfer-encoding") == "chunked":
            return RawAnswer(status, headers, [one async for one in self.chunks()])
        if "content-length" in headers:
            size = int(headers["content-length"])
            return RawAnswer(status, headers, [await self.reader.readexactly(size)])
        return RawAnswer(status, headers, [await self.reader.read(-1)])

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def closed(self) -> bool:
        """Nothing more comes."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


Connect = Callable[..., AbstractAsyncContextManager[RawConnection]]


@pytest.fixture
def connect() -> Connect:
    """`async with connect(port) as one:`; `receive_buffer` in bytes makes a slow reader."""

    @asynccontextmanager
    async def opened(port: int, *, receive_buffer: int = 0) -> AsyncIterator[RawConnection]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = 4096 if receive_buffer else 1 << 20
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        one = RawConnection(reader, writer)
        try:
            yield one
        finally:
            await one.close()

    return opened
