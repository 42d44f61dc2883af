"""Tests of HttpServer: order of answers, ends of connections, shutdown."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dynamo.communication.http import (
    HttpLimits,
    HttpServer,
    PortInUse,
    Request,
    Response,
)
from dynamo.core.clock import SystemClock
from dynamo.core.errors import NoWorkers

TEXT = (("content-type", "text/plain"),)


async def describe_request(request: Request, response: Response) -> None:
    """Answer with method, path, query and body size of the request."""
    text = f"{request.method} {request.path} {request.query} {len(request.body)}"
    response.send(200, TEXT, text.encode())


async def count(request: Request, response: Response) -> None:
    """Stream five events, each written in two parts within one loop iteration."""
    response.start(200, TEXT)
    for number in range(5):
        response.write(b"%d," % number)
        response.write(b"%d;" % number)
        await asyncio.sleep(0.002)
    response.end(b"end")


async def test_a_connection_is_kept_alive(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    async with connect(port) as client:
        for path in ("/a", "/b?x=1", "/c%20d"):
            client.ask("GET", path)
            assert (await client.answer()).status == 200
        client.ask("POST", "/e", b"12345")
        assert (await client.answer()).body == b"POST /e  5"


async def test_pipelined_requests_are_answered_in_order(serve: Any, connect: Any) -> None:
    started: list[str] = []

    async def slow_first(request: Request, response: Response) -> None:
        started.append(request.path)
        await asyncio.sleep(0.03 if request.path == "/0" else 0)
        await describe_request(request, response)

    _, port = await serve(slow_first, max_pipelined=4)
    async with connect(port) as client:
        for number in range(40):
            client.ask("GET", f"/{number}")
        for number in range(40):
            assert (await client.answer()).body == f"GET /{number}  0".encode()
    assert started == [f"/{number}" for number in range(40)]


async def test_events_of_one_loop_iteration_are_one_chunk(serve: Any, connect: Any) -> None:
    _, port = await serve(count)
    async with connect(port) as client:
        client.ask("GET", "/")
        answer = await client.answer()
    assert answer.chunks == [b"0,0;", b"1,1;", b"2,2;", b"3,3;", b"4,4;", b"end"]


async def test_http_1_0_streams_until_the_connection_closes(serve: Any, connect: Any) -> None:
    _, port = await serve(count)
    async with connect(port) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await client.answer()
    assert answer.body == b"0,0;1,1;2,2;3,3;4,4;end"
    assert answer.headers["connection"] == "close"


async def test_http_1_0_may_keep_alive(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    async with connect(port) as client:
        for _ in range(2):
            client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await client.answer()).headers["connection"] == "keep-alive"


async def test_the_answer_to_head_has_no_body(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    async with connect(port) as client:
        client.ask("HEAD", "/x")
        answer = await client.answer(bodiless=True)
        assert int(answer.headers["content-length"]) > 0
        client.ask("GET", "/y")
        assert (await client.answer()).body == b"GET /y  0"


async def test_expect_continue(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    async with connect(port) as client:
        client.send(
            b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
        )
        assert (await client.head())[0] == 100
        client.send(b"abc")
        assert (await client.answer()).body == b"POST /  3"


async def test_chunked_body_split_into_bytes(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    request = (
        b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
    )
    async with connect(port) as client:
        for start in range(len(request)):
            client.send(request[start : start + 1])
            await asyncio.sleep(0)
        assert (await client.answer()).body == b"POST /c  5"


@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_offered_upgrade_is_ignored(serve: Any, connect: Any, step: int) -> None:
    """Java's client and `curl --http2` offer h2c with every request, also with bodies."""
    _, port = await serve(describe_request)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = b"POST /a HTTP/1.1\r\nHost: b\r\n" + offer
    data = head + b"Content-Length: 5\r\n\r\nhello"
    data += head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nwo\r\n3\r\nrld\r\n0\r\n\r\n"
    data += head + b"\r\n" + b"GET /c HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n"
    async with connect(port) as client:
        for start in range(0, len(data), step):
            client.send(data[start : start + step])
            await asyncio.sleep(0)
        bodies = [(await client.answer()).body for _ in range(4)]
        assert bodies == [b"POST /a  5", b"POST /a  5", b"POST /a  0", b"GET /c  0"]
        assert await client.closed()


async def test_connect_is_closed_without_a_tunnel(serve: Any, connect: Any) -> None:
    _, port = await serve(describe_request)
    async with connect(port) as client:
        client.send(
            b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        )
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.closed()


async def test_a_client_that_leaves_cancels_its_request(serve: Any, connect: Any) -> None:
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    _, port = await serve(wait)
    async with connect(port) as client:
        client.ask("GET", "/")
        await entered.wait()
    await cancelled.wait()


async def test_a_failing_handler_is_answered_with_500_and_keep_alive(
    serve: Any, connect: Any
) -> None:
    async def fail(request: Request, response: Response) -> None:
        if request.path == "/typed":
            raise NoWorkers("no worker is ready")
        if request.path == "/silent":
            return
        raise ZeroDivisionError

    _, port = await serve(fail)
    async with connect(port) as client:
        for path in ("/typed", "/silent", "/bug"):
            client.ask("GET", path)
            answer = await client.answer()
            assert answer.status == 500
            assert "ZeroDivision" not in answer.body.decode()


async def test_a_failing_stream_is_truncated(serve: Any, connect: Any) -> None:
    async def fail(request: Request, response: Response) -> None:
        response.start(200, TEXT)
        response.write(b"some")
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    _, port = await serve(fail)
    async with connect(port) as client:
        client.ask("GET", "/")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.answer()


async def test_line_breaks_in_headers_are_refused(serve: Any, connect: Any) -> None:
    async def split(request: Request, response: Response) -> None:
        response.send(200, (("x", "a\r\nset-cookie: b"),), b"")

    _, port = await serve(split)
    async with connect(port) as client:
        client.ask("GET", "/")
        answer = await client.answer()
    assert answer.status == 500
    assert "set-cookie" not in answer.headers


async def test_stop_lets_requests_end(serve: Any, connect: Any) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        await release.wait()
        await describe_request(request, response)

    server, port = await serve(wait)
    async with connect(port) as idle_client, connect(port) as busy_client:
        busy_client.ask("GET", "/")
        await entered.wait()
        stopping = asyncio.create_task(server.stop(10))
        assert await idle_client.closed()
        release.set()
        assert (await busy_client.answer()).status == 200
        assert await busy_client.closed()
        await stopping
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_clients_of_a_server_that_leaves_are_sent_elsewhere(serve: Any, connect: Any) -> None:
    release = asyncio.Event()

    async def stream_or_describe(request: Request, response: Response) -> None:
        if request.path == "/stream":
            response.start(200, TEXT)
            response.write(b"begun")
            await release.wait()
            response.end()
        else:
            await describe_request(request, response)

    server, port = await serve(stream_or_describe)
    async with connect(port) as used, connect(port) as unused, connect(port) as streaming:
        used.ask("GET", "/")
        assert "connection" not in (await used.answer()).headers
        streaming.ask("GET", "/stream")
        while server.in_flight == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # the head is written, without `connection: close`
        leaving = asyncio.create_task(server.leave(60, 60))
        await asyncio.sleep(0)
        for client in (used, unused):
            client.ask("GET", "/")
            assert (await client.answer()).headers["connection"] == "close"
            assert await client.closed()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        release.set()
        assert "connection" not in (await streaming.answer()).headers
        assert not leaving.done()
        streaming.ask("GET", "/")
        assert (await streaming.answer()).headers["connection"] == "close"
        await leaving
    await server.stop(0)


async def test_a_server_that_leaves_closes_idle_connections(serve: Any, connect: Any) -> None:
    server, port = await serve(describe_request, header_timeout_s=0.1)
    async with connect(port) as used, connect(port) as unused:
        used.ask("GET", "/")
        assert (await used.answer()).status == 200
        await server.leave(0.02, 60)
        assert await used.closed()
        assert await unused.closed()


class TestLeave:
    """Both kinds of event loop."""

    async def scenario(self) -> None:
        server = HttpServer(describe_request, HttpLimits(), SystemClock())
        port = await server.start("127.0.0.1", 0)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for client in clients:  # none is accepted before the loop runs
            client.sendall(b"GET /waits HTTP/1.1\r\nhost: a\r\n\r\n")
        await server.leave(60, 60)
        for client in clients:
            with client:
                answer = client.recv(1 << 16)
            assert b"connection: close" in answer
            assert answer.endswith(b"GET /waits  0")
        await server.stop(0)

    def test_connections_that_wait_to_be_accepted_are_answered(self) -> None:
        asyncio.run(self.scenario())

    def test_connections_that_wait_are_answered_under_uvloop(self) -> None:
        import uvloop

        uvloop.run(self.scenario())


async def test_stop_cancels_requests_that_do_not_end(serve: Any, connect: Any) -> None:
    entered = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        entered.set()
        await asyncio.Event().wait()

    server, port = await serve(wait)
    async with connect(port) as client:
        client.ask("GET", "/")
        await entered.wait()
        await server.stop(0.01)
        assert await client.closed()
    assert server.in_flight == 0


async def test_a_port_in_use_is_reported(serve: Any) -> None:
    _, port = await serve(describe_request)
    other = HttpServer(describe_request, HttpLimits(), SystemClock())
    with pytest.raises(PortInUse) as error:
        await other.start("127.0.0.1", port)
    assert error.value.port == port


async def test_a_port_is_shared_only_with_reuse_port(connect: Any) -> None:
    servers = [HttpServer(describe_request, HttpLimits(), SystemClock()) for _ in range(2)]
    port = await servers[0].start("127.0.0.1", 0, reuse_port=True)
    try:
        assert await servers[1].start("127.0.0.1", port, reuse_port=True) == port
        with pytest.raises(PortInUse):
            await HttpServer(describe_request, HttpLimits(), SystemClock()).start("127.0.0.1", port)
    finally:
        for server in servers:
            await server.stop(0)


def test_the_server_works_under_uvloop(connect: Any) -> None:
    import uvloop

    async def scenario() -> None:
        server = HttpServer(count, HttpLimits(), SystemClock())
        port = await server.start("127.0.0.1", 0)
        async with connect(port) as client:
            for _ in range(2):
                client.ask("GET", "/")
                assert len((await client.answer()).chunks) == 6
            client.send(b"nonsense\r\n\r\n")
            assert (await client.answer()).status == 400
            assert await client.closed()
        await server.stop(1)

    uvloop.run(scenario())
