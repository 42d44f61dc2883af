"""Requests in, responses out, in order; connections that end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.communication.http import (
    HttpLimits,
    HttpServer,
    PortInUse,
    Request,
    Response,
    probe_port,
)
from dynamo.core.clock import SystemClock
from dynamo.core.errors import NoWorkers

TEXT = (("content-type", "text/plain"),)


async def tell(request: Request, response: Response) -> None:
    """Answers with what it was asked."""
    text = f"{request.method} {request.path} {request.query} {len(request.body)}"
    response.send(200, TEXT, text.encode())


async def count(request: Request, response: Response) -> None:
    """A stream of five events, one a turn of the loop."""
    response.start(200, TEXT)
    for number in range(5):
        response.write(b"%d," % number)
        response.write(b"%d;" % number)
        await asyncio.sleep(0.002)
    response.end(b"end")


async def test_keeps_the_connection(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    async with connect(port) as one:
        for path in ("/a", "/b?x=1", "/c%20d"):
            one.ask("GET", path)
            assert (await one.answer()).status == 200
        one.ask("POST", "/e", b"12345")
        assert (await one.answer()).body == b"POST /e  5"


async def test_pipelined_requests_are_answered_in_order(serve: Any, connect: Any) -> None:
    started: list[str] = []

    async def slow_first(request: Request, response: Response) -> None:
        started.append(request.path)
        await asyncio.sleep(0.03 if request.path == "/0" else 0)
        await tell(request, response)

    _, port = await serve(slow_first, max_pipelined=4)
    async with connect(port) as one:
        for number in range(40):
            one.ask("GET", f"/{number}")
        for number in range(40):
            assert (await one.answer()).body == f"GET /{number}  0".encode()
    assert started == [f"/{number}" for number in range(40)]


async def test_events_of_one_turn_are_one_chunk(serve: Any, connect: Any) -> None:
    _, port = await serve(count)
    async with connect(port) as one:
        one.ask("GET", "/")
        answer = await one.answer()
    assert answer.chunks == [b"0,0;", b"1,1;", b"2,2;", b"3,3;", b"4,4;", b"end"]


async def test_http_1_0_streams_until_the_connection_closes(serve: Any, connect: Any) -> None:
    _, port = await serve(count)
    async with connect(port) as one:
        one.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await one.answer()
    assert answer.body == b"0,0;1,1;2,2;3,3;4,4;end"
    assert answer.headers["connection"] == "close"


async def test_http_1_0_may_keep_alive(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    async with connect(port) as one:
        for _ in range(2):
            one.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await one.answer()).headers["connection"] == "keep-alive"


async def test_head_has_the_head_alone(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    async with connect(port) as one:
        one.ask("HEAD", "/x")
        answer = await one.answer(bodiless=True)
        assert int(answer.headers["content-length"]) > 0
        one.ask("GET", "/y")
        assert (await one.answer()).body == b"GET /y  0"


async def test_expect_continue(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    async with connect(port) as one:
        one.send(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        assert (await one.head())[0] == 100
        one.send(b"abc")
        assert (await one.answer()).body == b"POST /  3"


async def test_chunked_body_split_into_bytes(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    request = (
        b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
    )
    async with connect(port) as one:
        for start in range(len(request)):
            one.send(request[start : start + 1])
            await asyncio.sleep(0)
        assert (await one.answer()).body == b"POST /c  5"


@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_offered_upgrade_is_left_alone(serve: Any, connect: Any, step: int) -> None:
    """Java's client and `curl --http2` offer h2c with every request, bodies too."""
    _, port = await serve(tell)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = b"POST /a HTTP/1.1\r\nHost: b\r\n" + offer
    data = head + b"Content-Length: 5\r\n\r\nhello"
    data += head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nwo\r\n3\r\nrld\r\n0\r\n\r\n"
    data += head + b"\r\n" + b"GET /c HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n"
    async with connect(port) as one:
        for start in range(0, len(data), step):
            one.send(data[start : start + step])
            await asyncio.sleep(0)
        said = [(await one.answer()).body for _ in range(4)]
        assert said == [b"POST /a  5", b"POST /a  5", b"POST /a  0", b"GET /c  0"]
        assert await one.closed()


async def test_no_tunnel(serve: Any, connect: Any) -> None:
    _, port = await serve(tell)
    async with connect(port) as one:
        one.send(b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await one.answer()).headers["connection"] == "close"
        assert await one.closed()


async def test_a_client_that_leaves_cancels_its_request(serve: Any, connect: Any) -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    _, port = await serve(wait)
    async with connect(port) as one:
        one.ask("GET", "/")
        await entered.wait()
    await cancelled.wait()


async def test_a_failing_handler_is_500_and_the_connection_lives(serve: Any, connect: Any) -> None:
    async def fail(request: Request, response: Response) -> None:
        if request.path == "/typed":
            raise NoWorkers("nobody is there")
        if request.path == "/silent":
            return
        raise ZeroDivisionError

    _, port = await serve(fail)
    async with connect(port) as one:
        for path in ("/typed", "/silent", "/bug"):
            one.ask("GET", path)
            answer = await one.answer()
            assert answer.status == 500
            assert "ZeroDivision" not in answer.body.decode()


async def test_a_stream_that_fails_is_cut_short(serve: Any, connect: Any) -> None:
    async def fail(request: Request, response: Response) -> None:
        response.start(200, TEXT)
        response.write(b"some")
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    _, port = await serve(fail)
    async with connect(port) as one:
        one.ask("GET", "/")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await one.answer()


async def test_line_breaks_in_headers_are_refused(serve: Any, connect: Any) -> None:
    async def split(request: Request, response: Response) -> None:
        response.send(200, (("x", "a\r\nset-cookie: b"),), b"")

    _, port = await serve(split)
    async with connect(port) as one:
        one.ask("GET", "/")
        answer = await one.answer()
    assert answer.status == 500
    assert "set-cookie" not in answer.headers


async def test_stop_lets_requests_end(serve: Any, connect: Any) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        await go.wait()
        await tell(request, response)

    server, port = await serve(wait)
    async with connect(port) as idle, connect(port) as busy:
        busy.ask("GET", "/")
        await entered.wait()
        stopping = asyncio.create_task(server.stop(10))
        assert await idle.closed()
        go.set()
        assert (await busy.answer()).status == 200
        assert await busy.closed()
        await stopping
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_stop_cancels_what_does_not_end(serve: Any, connect: Any) -> None:
    entered = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        await asyncio.Event().wait()

    server, port = await serve(wait)
    async with connect(port) as one:
        one.ask("GET", "/")
        await entered.wait()
        await server.stop(0.01)
        assert await one.closed()
    assert server.in_flight == 0


async def test_a_port_in_use_is_told(serve: Any) -> None:
    _, port = await serve(tell)
    with pytest.raises(PortInUse) as caught:
        await probe_port("127.0.0.1", port)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
    other = HttpServer(tell, HttpLimits(), SystemClock())
    with pytest.raises(PortInUse):
        await other.start("127.0.0.1", port)


async def test_sharing_processes_share_and_strangers_do_not(connect: Any) -> None:
    servers = [HttpServer(tell, HttpLimits(), SystemClock()) for _ in range(2)]
    await probe_port("127.0.0.1", 0)
    port = await servers[0].start("127.0.0.1", 0, reuse_port=True)
    try:
        assert await servers[1].start("127.0.0.1", port, reuse_port=True) == port
        with pytest.raises(PortInUse):
            await probe_port("127.0.0.1", port)
    finally:
        for server in servers:
            await server.stop(0)


def test_everything_under_uvloop(connect: Any) -> None:
    import uvloop

    async def scenario() -> None:
        server = HttpServer(count, HttpLimits(), SystemClock())
        port = await server.start("127.0.0.1", 0)
        async with connect(port) as one:
            for _ in range(2):
                one.ask("GET", "/")
                assert len((await one.answer()).chunks) == 6
            one.send(b"nonsense\r\n\r\n")
            assert (await one.answer()).status == 400
            assert await one.closed()
        await server.stop(1)

    uvloop.run(scenario())
