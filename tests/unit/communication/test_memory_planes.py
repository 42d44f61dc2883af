"""Tests of memory planes while the network between two of them is severed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.communication.events import Event
from dynamo.communication.events.memory import MemoryEvents
from dynamo.communication.requests import ResponseWriter
from dynamo.communication.requests.memory import MemoryRequests
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import BackgroundTasks


class OpenCall:
    """A server that sends payloads on demand, a client, and one open call between them."""

    def __init__(self) -> None:
        self.outgoing: ResponseWriter | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.received: list[bytes] = []

    async def start(self, tasks: BackgroundTasks) -> None:
        self.client = await MemoryRequests.open("memory:")
        self.server = await MemoryRequests.open("memory:")
        await self.server.serve("hold", self._handle)
        self.call = tasks.start(self._call())
        await self.started.wait()

    async def _call(self) -> None:
        def sink(payload: bytes) -> bool:
            self.received.append(payload)
            return True

        await self.client.call(self.server.address, "hold", b"", Context("r"), sink)

    async def _handle(self, payload: bytes, writer: ResponseWriter) -> None:
        self.outgoing = writer
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def send(self, payload: bytes) -> None:
        assert self.outgoing is not None
        self.outgoing.send(payload)
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.fixture
async def call() -> AsyncIterator[OpenCall]:
    call = OpenCall()
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        await call.start(tasks)
        yield call
        await call.server.close()
        await call.client.close()


async def test_held_items_arrive_in_order_after_rejoin(call: OpenCall) -> None:
    await call.send(b"1")
    call.server.network.sever()
    await call.send(b"2")
    await call.send(b"3")
    assert call.received == [b"1"]
    call.server.network.rejoin()
    await call.send(b"4")
    assert call.received == [b"1", b"2", b"3", b"4"]


async def test_disconnect_fails_the_call_at_once_and_the_handler_after_rejoin(
    call: OpenCall,
) -> None:
    call.server.network.sever()
    await call.send(b"late")
    call.client.disconnect(call.server.address)
    with pytest.raises(WorkerFailed):
        await call.call
    await call.send(b"later")
    assert not call.ended.is_set()
    call.server.network.rejoin()
    await call.ended.wait()
    await call.send(b"latest")
    assert call.received == []


async def test_an_abort_fails_the_call_after_rejoin(call: OpenCall) -> None:
    call.server.network.sever()
    call.server.abort()
    await call.ended.wait()
    await asyncio.sleep(0)
    assert not call.call.done()
    call.server.network.rejoin()
    with pytest.raises(WorkerFailed):
        await call.call


async def test_lost_events_are_repaired_after_rejoin() -> None:
    directory = await MemoryDiscovery.open("memory:severed")
    subscriber, publisher = [await MemoryEvents.open("memory:", directory) for _ in range(2)]
    events: list[Event] = []
    arrived = asyncio.Event()

    def listen(event: Event) -> None:
        events.append(event)
        arrived.set()

    source = await publisher.open_source("s", "p")
    await subscriber.subscribe("s", listen)

    async def seen(count: int) -> list[tuple[str, bytes]]:
        while len(events) < count:
            arrived.clear()
            await arrived.wait()
        return [(event.kind, event.payload) for event in events]

    source.publish(b"1")
    assert await seen(1) == [("event", b"1")]
    publisher.network.sever(breaks=True)
    assert await seen(2) == [("event", b"1"), ("stale", b"")]
    source.publish(b"2")
    publisher.network.rejoin()
    source.publish(b"3")
    assert (await seen(4))[2:] == [("event", b"2"), ("event", b"3")]
    await subscriber.close()
    await publisher.close()
    await directory.close()
