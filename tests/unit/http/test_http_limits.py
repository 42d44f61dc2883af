"""Tests of the limits on requests, slow clients and unread responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.communication.http import Request, Response

TEXT = (("content-type", "text/plain"),)
MIB = 1 << 20


async def answer_size(request: Request, response: Response) -> None:
    response.send(200, TEXT, b"%d" % len(request.body))


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (413, HEAD + b"content-length: 1001\r\n\r\n"),
        (413, HEAD + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n"),
        (413, HEAD + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"),
        (
            431,
            HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"t: xxxxxxx\r\n" * 400 + b"\r\n",
        ),
        (431, HEAD + b"x: 1\r\n" * 20 + b"\r\n"),
        (431, HEAD + b"x: " + b"y" * 3000 + b"\r\n\r\n"),
        (431, HEAD + b"x: " + b"y" * 3000),
        (431, b"GET /" + b"u" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"),
        (408, b"GET / HT"),
        (408, HEAD + b"x: y\r\n"),
        (408, HEAD + b"content-length: 10\r\n\r\n123"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00"),
    ],
)
async def test_a_request_over_a_limit(serve: Any, connect: Any, status: int, data: bytes) -> None:
    _, port = await serve(
        answer_size,
        max_body_bytes=1000,
        max_header_bytes=2048,
        max_headers=12,
        header_timeout_s=0.2,
    )
    async with connect(port) as client:
        client.send(data)
        answer = await client.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert await client.closed()


async def test_a_dripping_body_is_too_slow(serve: Any, connect: Any) -> None:
    _, port = await serve(answer_size, header_timeout_s=0.2, min_body_rate=1_000_000)
    async with connect(port) as client:
        client.send(HEAD, b"content-length: 100000\r\n\r\n")
        drip = asyncio.create_task(_drip(client))
        assert (await client.answer()).status == 408
        drip.cancel()


async def _drip(client: Any) -> None:
    while True:
        client.send(b"x")
        await asyncio.sleep(0.01)


async def test_an_idle_connection_is_closed(serve: Any, connect: Any) -> None:
    _, port = await serve(answer_size, idle_timeout_s=0.1)
    async with connect(port) as never, connect(port) as served:
        served.ask("GET", "/")
        assert (await served.answer()).status == 200
        assert await never.closed()
        assert await served.closed()


async def test_a_connection_without_a_request_has_the_shorter_timeout(
    serve: Any, connect: Any
) -> None:
    _, port = await serve(answer_size, header_timeout_s=0.2, idle_timeout_s=60.0)
    async with connect(port) as silent, connect(port) as blank, connect(port) as served:
        blank.send(b"\r\n")
        served.ask("GET", "/")
        assert (await served.answer()).status == 200
        assert await silent.closed()
        assert await blank.closed()
        served.ask("GET", "/")
        assert (await served.answer()).status == 200


async def test_a_rejection_waits_for_earlier_answers(serve: Any, connect: Any) -> None:
    async def answer_slowly(request: Request, response: Response) -> None:
        await asyncio.sleep(0.02)
        await answer_size(request, response)

    _, port = await serve(answer_slowly)
    async with connect(port) as client:
        client.ask("GET", "/")
        client.ask("GET", "/")
        client.send(b"FOO BAR\r\n\r\n")
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 400]
        assert await client.closed()


class Flood:
    """A handler that writes `total` bytes as events and records the state of the response.

    One that is `patient` writes nothing while its reader is behind.
    """

    def __init__(self, total: int, *, patient: bool = False) -> None:
        self.total = total
        self.patient = patient
        self.congested = asyncio.Event()
        self.relieved = asyncio.Event()
        self.ended = asyncio.Event()
        self.overrun = False

    async def __call__(self, request: Request, response: Response) -> None:
        response.start(200, TEXT)
        response.on_writable = self.relieved.set
        written = 0
        while written < self.total and response.write(b"e" * 2048):
            written += 2048
            if response.congested:
                self.congested.set()
                if self.patient:
                    self.relieved.clear()
                    await self.relieved.wait()
            await asyncio.sleep(0)
        self.overrun = response.overrun
        response.end(b"bye")
        self.ended.set()


async def test_a_reader_that_resumes_gets_everything(serve: Any, connect: Any) -> None:
    flood = Flood(800 << 10, patient=True)
    _, port = await serve(flood, stream_backlog_bytes=256 << 10)
    async with connect(port, receive_buffer=4096) as client:
        client.ask("GET", "/")
        await flood.congested.wait()
        answer = await client.answer()
    assert flood.relieved.is_set()
    assert not flood.overrun
    assert len(answer.body) == (800 << 10) + 3


async def test_an_unread_stream_overruns(serve: Any, connect: Any) -> None:
    flood = Flood(8 * MIB)
    _, port = await serve(flood, stream_backlog_bytes=256 << 10)
    async with connect(port, receive_buffer=4096) as client:
        client.ask("GET", "/")
        await flood.ended.wait()
        assert flood.overrun
        answer = await client.answer()
    assert answer.body.endswith(b"ebye")
    assert len(answer.body) < 2 * MIB


async def test_a_stalled_connection_is_dropped(serve: Any, connect: Any) -> None:
    flood = Flood(600 << 10)
    server, port = await serve(flood, stall_timeout_s=0.1)
    async with connect(port, receive_buffer=4096) as client:
        client.ask("GET", "/")
        await flood.ended.wait()
        assert flood.congested.is_set()
        while server.connections:
            await asyncio.sleep(0.02)
