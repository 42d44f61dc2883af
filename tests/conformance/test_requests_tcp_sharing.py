"""Tests of TCP requests: the budget of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from dynamo.communication.handshake import pack_hello
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.shared_payload import SharedPayload
from dynamo.core.tasks import BackgroundTasks

CONTEXT = Context("r")
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(accept: Accept) -> AsyncIterator[str]:
    """Yield the address of a server that serves connections by `accept`."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            await accept(reader, writer)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}/abc"
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


@pytest.fixture
async def client() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:")
    yield plane
    await plane.close()


async def test_a_call_over_the_budget_of_a_connection_fails_alone(client: TcpRequests) -> None:
    broken: list[str] = []
    client.on_connection_broken(broken.append)
    big = bytes(20 << 20)
    read_on = asyncio.Event()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_hello("requests", "abc"))
        await read_on.wait()
        while await reader.read(1 << 20):
            pass

    async with raw_server(read_late) as address, BackgroundTasks() as tasks:
        calls = [
            tasks.start(client.call(address, "e", big, CONTEXT, lambda _: True)) for _ in range(12)
        ]
        while sum(call.done() for call in calls) < 8:
            await asyncio.sleep(0.01)
        errors = [call.exception() for call in calls if call.done()]
        assert {type(error) for error in errors} == {Overloaded}
        assert all(error.retryable for error in errors if isinstance(error, Overloaded))
        shared = SharedPayload(big)
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
