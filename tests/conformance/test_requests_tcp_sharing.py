"""Tests of TCP requests: shared payloads for old peers, and the budget of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from dynamo.communication import handshake
from dynamo.communication.handshake import pack_hello
from dynamo.communication.requests import ResponseWriter
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.shared_payload import SharedPayload
from dynamo.core.tasks import BackgroundTasks

CONTEXT = Context("r")


@pytest.fixture
async def client() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:")
    yield plane
    await plane.close()


async def test_a_server_of_version_1_gets_whole_payloads(
    client: TcpRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(payload: bytes, writer: ResponseWriter) -> None:
        writer.send(payload)

    server = await TcpRequests.open("tcp:")
    await server.serve("echo", echo)
    monkeypatch.setattr(handshake, "negotiate_version", lambda _: 1)
    received: list[bytes] = []
    shared = SharedPayload(b"common", lambda own: b"whole " + own)
    await client.call(
        server.address,
        "echo",
        b"own",
        CONTEXT,
        lambda payload: received.append(payload) is None,
        shared=shared,
    )
    assert received == [b"whole own"]
    await server.close()


@asynccontextmanager
async def deaf_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that completes the handshake and reads nothing more until the event is set."""
    read_on = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_hello("requests", "abc"))
        await read_on.wait()
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}/abc", read_on
    finally:
        read_on.set()
        listener.close()


async def test_a_call_over_the_budget_of_a_connection_fails_alone(client: TcpRequests) -> None:
    broken: list[str] = []
    client.on_connection_broken(broken.append)
    big = bytes(20 << 20)
    async with deaf_server() as (address, read_on), BackgroundTasks() as tasks:
        calls = [
            tasks.start(client.call(address, "e", big, CONTEXT, lambda _: True)) for _ in range(12)
        ]
        while sum(call.done() for call in calls) < 8:
            await asyncio.sleep(0.01)
        errors = [call.exception() for call in calls if call.done()]
        assert {type(error) for error in errors} == {Overloaded}
        assert all(error.retryable for error in errors if isinstance(error, Overloaded))
        shared = SharedPayload(big, lambda own: big + own)
        with pytest.raises(Overloaded):
            await client.call(address, "e", b"x", CONTEXT, lambda _: True, shared=shared)
        sent, unsent = client.count_sent_bytes(address)
        assert 40 << 20 < unsent <= 64 << 20
        ping = tasks.start(client.call(address, "e", b"", CONTEXT, lambda _: True))
        await asyncio.sleep(0.01)
        assert not ping.done()
        read_on.set()
        while client.count_sent_bytes(address)[1]:
            await asyncio.sleep(0.01)
        assert client.count_sent_bytes(address)[0] > sent
        assert broken == []
        assert len([call for call in calls if not call.done()]) >= 3
        for call in (*calls, ping):
            call.cancel()
        await asyncio.sleep(0)
