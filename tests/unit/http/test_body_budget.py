"""Tests of the memory for bodies: what counts, what is refused, when it is released."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.communication.http import HttpServer, Request, Response
from dynamo.communication.http.body_budget import BodyBudget
from dynamo.communication.http.limits import HttpLimits
from dynamo.core.errors import Overloaded
from dynamo.core.settings.schema import ServerSettings

TEXT = (("content-type", "text/plain"),)
KIB = 1024


async def answer_size(request: Request, response: Response) -> None:
    response.send(200, TEXT, b"%d" % len(request.body))


def head(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size


async def held(server: HttpServer, size: int) -> None:
    """Wait until the server counts `size` bytes."""
    async with asyncio.timeout(5):
        while server.budget.held_bytes != size:
            await asyncio.sleep(0.005)


async def test_an_unfinished_body_counts_until_it_is_served(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size)
    async with connect(port) as client:
        client.send(head(100), b"x" * 60)
        await held(server, 60)
        client.send(b"x" * 20)
        await held(server, 80)
        client.send(b"x" * 20)
        assert (await client.answer()).body == b"100"
        assert server.budget.held_bytes == 0
        client.send(head(50), b"x" * 50)
        assert (await client.answer()).body == b"50"
        assert server.budget.held_bytes == 0


async def test_a_body_is_released_when_its_client_leaves(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size)
    async with connect(port) as client:
        client.send(head(100), b"x" * 60)
        await held(server, 60)
    await held(server, 0)


async def test_a_body_is_released_when_its_request_is_rejected(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size, header_timeout_s=0.2, max_body_bytes=100)
    chunked = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    async with connect(port) as slow, connect(port) as large, connect(port) as wrong:
        slow.send(head(100), b"x" * 60)
        large.send(chunked, b"20\r\n" + b"x" * 32 + b"\r\n")
        wrong.send(chunked, b"20\r\n" + b"x" * 32 + b"\r\n")
        await held(server, 60 + 32 + 32)
        large.send(b"ff\r\n" + b"x" * 255)
        wrong.send(b"no size\r\n")
        assert (await large.answer()).status == 413
        assert (await wrong.answer()).status == 400
        assert (await slow.answer()).status == 408
        assert server.budget.held_bytes == 0


async def test_queued_bodies_count_until_they_are_served_or_dropped(
    serve: Any, connect: Any
) -> None:
    opened = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        await opened.wait()
        await answer_size(request, response)

    server, port = await serve(wait)
    async with connect(port) as client, connect(port) as leaver:
        for connection in (client, leaver):
            connection.ask("GET", "/")
            connection.send(head(40), b"x" * 40, head(30), b"x" * 30, head(20), b"x" * 10)
        await held(server, 2 * (40 + 30 + 10))
        await leaver.close()
        await held(server, 40 + 30 + 10)
        opened.set()
        client.send(b"x" * 10)
        assert [(await client.answer()).body for _ in range(4)] == [b"0", b"40", b"30", b"20"]
        assert server.budget.held_bytes == 0


async def test_a_body_is_released_when_the_server_stops(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size)
    async with connect(port) as client:
        client.send(head(100), b"x" * 60)
        await held(server, 60)
        await server.stop(0)
        assert await client.closed()
        await held(server, 0)


async def test_a_body_beyond_the_budget_is_refused(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size, max_buffered_bytes=800 * KIB, max_body_bytes=1 << 20)
    async with connect(port) as first, connect(port) as second, connect(port) as small:
        first.send(head(1 << 20), b"x" * 600 * KIB)
        await held(server, 600 * KIB)
        second.send(head(300 * KIB), b"x" * 200 * KIB)
        answer = await second.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert b"the bodies of unfinished requests" in answer.body
        await held(server, 600 * KIB)
        small.send(head(60 * KIB), b"x" * 50 * KIB)
        await asyncio.sleep(0.05)
        small.send(b"x" * 10 * KIB)
        assert (await small.answer()).body == b"%d" % (60 * KIB)
        first.send(b"x" * 150 * KIB)
        assert (await first.answer()).status == 503
        await held(server, 0)


def test_small_bodies_have_a_reserve() -> None:
    budget = BodyBudget(HttpLimits(max_buffered_bytes=800_000))
    budget.held_bytes = 700_000
    budget.check(500_000)
    budget.held_bytes += 1
    with pytest.raises(Overloaded, match="800000 bytes") as refused:
        budget.check(500_000)
    assert refused.value.retry_after_s
    budget.check(60_000)
    budget.held_bytes = 800_001
    with pytest.raises(Overloaded):
        budget.check(60_000)


async def test_a_burst_buys_no_time_for_the_rest_of_a_body(serve: Any, connect: Any) -> None:
    server, port = await serve(answer_size, header_timeout_s=0.3, min_body_rate=1000)
    async with connect(port) as client:
        client.send(head(1 << 20), b"x" * (900 * KIB))
        started = asyncio.get_running_loop().time()
        async with asyncio.timeout(5):
            while server.budget.held_bytes:
                client.send(b"x")
                await asyncio.sleep(0.02)
            assert (await client.answer()).status == 408
        assert asyncio.get_running_loop().time() - started < 3


async def test_an_upload_at_the_least_rate_is_served(serve: Any, connect: Any) -> None:
    _, port = await serve(answer_size, header_timeout_s=0.4, min_body_rate=1000)
    async with connect(port) as client:
        client.send(head(1000))
        for _ in range(20):
            client.send(b"x" * 50)
            await asyncio.sleep(0.05)
        assert (await client.answer()).body == b"1000"


async def test_requests_behind_a_long_answer_share_the_budget(serve: Any, connect: Any) -> None:
    """The request beyond the budget is refused after the earlier ones, and the rest is dropped."""
    opened = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        await opened.wait()
        await answer_size(request, response)

    server, port = await serve(wait, max_buffered_bytes=800 * KIB, max_body_bytes=1 << 20)
    async with connect(port) as client:
        client.ask("GET", "/")
        client.send(*[head(100 * KIB) + b"x" * 100 * KIB] * 12)
        await held(server, 700 * KIB)
        opened.set()
        answers = [await client.answer() for _ in range(9)]
        assert [answer.status for answer in answers] == [200] * 8 + [503]
        assert await client.closed()
        await held(server, 0)


@pytest.mark.parametrize("size", [100, 100 * KIB])
async def test_reading_pauses_behind_many_requests(serve: Any, connect: Any, size: int) -> None:
    """The rest of the requests waits in the kernel, is not timed out, and is served at last."""
    opened = asyncio.Event()

    async def wait(request: Request, response: Response) -> None:
        await opened.wait()
        await answer_size(request, response)

    server, port = await serve(wait, header_timeout_s=0.2, max_pipelined=4)
    async with connect(port) as client:
        client.ask("GET", "/")
        client.send(*[head(size) + b"x" * size] * 60)
        await asyncio.sleep(0.6)
        assert 4 * size <= server.budget.held_bytes < 1 << 20
        opened.set()
        assert [(await client.answer()).status for _ in range(61)] == [200] * 61
        assert server.budget.held_bytes == 0


async def test_requests_before_a_malformed_one_have_their_time(serve: Any, connect: Any) -> None:
    """Reading continues when the queue is short again. This sets no time-out for a closed input."""
    opened = asyncio.Event()

    async def work(request: Request, response: Response) -> None:
        await opened.wait()
        await asyncio.sleep(0.6 if request.path == "/slow" else 0)
        await answer_size(request, response)

    _, port = await serve(work, header_timeout_s=0.2, max_pipelined=2)
    async with connect(port) as client:
        for path in ("/0", "/1", "/2", "/slow"):
            client.ask("GET", path)
        client.send(b"GET / HTTP/1.1\r\nmalformed\r\n\r\n")
        await asyncio.sleep(0.05)
        opened.set()
        assert [(await client.answer()).status for _ in range(5)] == [200] * 4 + [400]


def test_servers_without_bodies_have_small_limits() -> None:
    settings = ServerSettings(max_body_bytes=32 << 20, max_headers=50)
    assert HttpLimits.from_settings(settings).max_body_bytes == 32 << 20
    assert HttpLimits.from_settings(ServerSettings()).max_body_bytes == 4 << 20
    limits = HttpLimits.without_bodies(settings)
    assert (limits.max_body_bytes, limits.max_headers) == (16 << 10, 50)
