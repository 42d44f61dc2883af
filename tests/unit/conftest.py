"""Fixtures for runtimes of several processes and for HTTP connections that send raw bytes.

Raw bytes are needed for requests that an HTTP library would refuse to send.
"""

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
    """The settings of every runtime that `open_runtime` opens."""
    return Settings(runtime=RuntimeSettings(drain_s=5.0))


@pytest.fixture
async def open_runtime(process_settings: Settings) -> AsyncIterator[Open]:
    """`await open_runtime()` opens a runtime like that of another process, on memory planes."""
    processes = Processes(settings=process_settings)
    yield processes.open
    await processes.close()


class RawAnswer:
    """An HTTP response. Header names are in lower case; `body` is the joined `chunks`."""

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
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "code", "param", "hint", "request_id"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of every server-sent event. `[DONE]` stays text."""
        lines = self.body.decode().split("\n\n")
        assert lines[-1] == ""
        data = [line.removeprefix("data: ") for line in lines[:-1]]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


class RawConnection:
    """An HTTP connection that sends given bytes and parses responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Write a well-formed request. `body` is bytes or a JSON value."""
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        lines = {"host": "test", "content-length": str(len(data))} | (headers or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode(), data)

    async def answer(self, *, bodiless: bool = False) -> RawAnswer:
        """Read a response. Raises `IncompleteReadError` if it is cut short."""
        status, headers = await self.head()
        if bodiless or status in (204, 304):
            return RawAnswer(status, headers, [])
        if headers.get("transfer-encoding") == "chunked":
            return RawAnswer(status, headers, [chunk async for chunk in self.chunks()])
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
        """Whether the server closes the connection without sending more."""
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
    """`async with connect(port) as connection:`. A small `receive_buffer` makes a slow reader."""

    @asynccontextmanager
    async def opened(port: int, *, receive_buffer: int = 0) -> AsyncIterator[RawConnection]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = 4096 if receive_buffer else 1 << 20
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        connection = RawConnection(reader, writer)
        try:
            yield connection
        finally:
            await connection.close()

    return opened
