"""The HTTP client of one server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import suppress

import pytest

from dynamo.communication.http.client import HttpClient


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
