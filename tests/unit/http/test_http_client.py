"""The HTTP client of one server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import suppress

import pytest

from dynamo.communication.http import client as client_module
from dynamo.communication.http.client import HttpAnswer, HttpClient, OnData


async def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError):
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, None)
    for _ in range(5):
        assert (await client.send("GET", "/")).body == b"ok"
    assert len(writers) == 3
    client.close()
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_a_request_that_kills_the_server_is_sent_twice_at_most() -> None:
    requests: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []
    all_busy = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if len(requests) == 3:
            all_busy.set()
        await all_busy.wait()
        if b"POST" not in requests[-1]:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            with contextlib.suppress(asyncio.IncompleteReadError):
                requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, None)
    await asyncio.gather(*(client.send("GET", "/") for _ in range(3)))
    with pytest.raises(ConnectionError):
        await client.send("POST", "/")
    assert sum(b"POST" in request for request in requests) == 2
    client.close()
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_a_connection_that_is_dialled_while_the_client_closes_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", {}, None)
        sending = asyncio.create_task(client.send("GET", "/"))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(ConnectionError, match="the client is closed"):
            await sending
        await asyncio.sleep(0)  # transports close in the next iteration of the loop
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1) == b""


async def test_a_connection_notices_that_its_host_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", {}, None)
        connection = await client._connect()
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        connection.close()
        await asyncio.sleep(0)


async def answer_of(
    *parts: bytes, closes: bool = False, on_data: OnData | None = None
) -> HttpAnswer:
    """Return what the client reads where a server answers with `parts`."""
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        if closes:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, None)
    try:
        return await client.send("GET", "/", on_data=on_data)
    finally:
        client.close()
        server.close()
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((OK, b"x: ", *[b"y" * 10_000] * 10), "bytes of headers"),
        ((OK, *[b"x: y\r\n"] * 300, b"\r\n"), "more than 200 headers"),
        ((OK, *[b"x: %b\r\n" % (b"y" * 1000)] * 100), "65536 bytes"),
        ((CHUNKED, b"1\r\nx\r\n0\r\n", *[b"x: y\r\n"] * 300), "more than 200 headers"),
        ((CHUNKED, b"1;", *[b"y" * 10_000] * 10), "bytes of headers"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 20,), "16 answers 1xx"),
        ((OK, b"content-length: x\r\n\r\n"), "not HTTP"),
        ((CHUNKED, b"800001\r\n", *[b"x" * (1 << 20)] * 9), "8388608 bytes"),
    ],
    ids=["header", "headers", "bytes", "trailer", "extension", "interim", "length", "body"],
)
async def test_an_answer_without_an_end_is_an_error(parts: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(ConnectionError, match=message):
        await answer_of(*parts)


async def test_the_head_of_an_answer_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEAD_TIMEOUT_S", 0.0)
    with pytest.raises(ConnectionError, match="took more than 0 s"):
        await answer_of(OK + b"x: ")


async def test_only_the_beginning_of_a_long_error_is_read() -> None:
    head = b"HTTP/1.1 400 X\r\ncontent-length: 1000000000\r\n\r\n"
    answer = await answer_of(head, *[b"e" * 100_000] * 3)
    assert (answer.status, len(answer.body)) == (400, client_module.MAX_ERROR_BYTES)


async def test_interim_answers_are_skipped() -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    answer = await answer_of(hints + OK + b"content-length: 2\r\n\r\nok")
    assert (answer.status, answer.body, "link" in answer.headers) == (200, b"ok", False)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_body_may_end_with_its_connection(version: bytes) -> None:
    answer = await answer_of(b"HTTP/%b 200 OK\r\n\r\no" % version, b"k", closes=True)
    assert answer.body == b"ok"


async def test_a_connection_that_sends_an_answer_too_many_is_not_used_again() -> None:
    answer = OK + b"content-length: 2\r\n\r\nok"
    assert (await answer_of(answer + answer)).body == b"ok"
