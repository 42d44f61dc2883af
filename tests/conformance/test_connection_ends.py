"""Connections of every networked plane that end by RST, by FIN and silently.

Each end is noticed and repaired. A plane with a server (etcd, NATS) reports it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, get_args

import pytest
from tests.support.relay import ConnectionEnd, Relay
from tests.support.servers import EtcdProcess, NatsProcess

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.options import PlaneOptions
from dynamo.communication.requests import Requests, open_requests
from dynamo.core.context import Context
from dynamo_conformance.events import RecordingListener
from dynamo_conformance.requests import CollectingSink, echo_handler

OPTIONS = PlaneOptions(reconnect_wait_s=0.1)
REPAIR_S = 2.0
ENDS = get_args(ConnectionEnd)
RESETS = 25


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def open_plane(
    stack: AsyncExitStack, opener: Callable[..., Awaitable[Any]], *arguments: Any
) -> Any:
    plane = await opener(*arguments)
    stack.push_async_callback(plane.close)
    return plane


async def wait_state(plane: Discovery | Events | Requests, *, up: bool) -> None:
    async with asyncio.timeout(REPAIR_S + 3):  # for machines that are busy
        while bool(plane.connection_error) == up:
            await asyncio.sleep(0.002)


async def end_and_reconnect(relay: Relay, end: ConnectionEnd, connections: int = 1) -> None:
    """End the connections and wait for as many new ones. The time between may be very short."""
    before = relay.connection_count
    relay.end_connections(end)
    async with asyncio.timeout(REPAIR_S + 3):
        while relay.connection_count < before + connections:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("end", ENDS)
async def test_nats_events_arrive_again(
    nats: NatsProcess, stack: AsyncExitStack, end: ConnectionEnd
) -> None:
    relay = await stack.enter_async_context(Relay(nats.port))
    directory = await open_plane(stack, open_discovery, f"memory:ends-{end}")
    publisher: Events = await open_plane(stack, open_events, nats.url, directory, OPTIONS)
    subscriber: Events = await open_plane(
        stack, open_events, f"nats://127.0.0.1:{relay.port}", directory, OPTIONS
    )
    for plane in (publisher, subscriber):
        await wait_state(plane, up=True)
    listener = RecordingListener()
    await subscriber.subscribe("kv", listener)
    source = await publisher.open_source("kv", "w")
    source.publish(b"before")
    await listener.wait_for_payload(b"before")
    await end_and_reconnect(relay, end)
    await wait_state(subscriber, up=True)
    source.publish(b"after")
    await listener.wait_for_payload(b"after")


async def check_resets(nats: NatsProcess, stack: AsyncExitStack) -> None:
    """Reset the connections of several planes again and again; each is noticed and repaired."""
    relay = await stack.enter_async_context(Relay(nats.port))
    planes = [
        await open_plane(stack, open_requests, f"nats://127.0.0.1:{relay.port}", OPTIONS)
        for _ in range(6)
    ]
    for _ in range(RESETS):
        for plane in planes:
            await wait_state(plane, up=True)
        await end_and_reconnect(relay, "reset", len(planes))
    for plane in planes:
        await wait_state(plane, up=True)


class TestResets:
    async def test_many_resets_of_nats_connections_are_repaired(
        self, nats: NatsProcess, stack: AsyncExitStack
    ) -> None:
        await check_resets(nats, stack)


class TestResetsUvloop:
    async def test_many_resets_of_nats_connections_are_repaired(
        self, nats: NatsProcess, stack: AsyncExitStack
    ) -> None:
        await check_resets(nats, stack)


async def test_a_client_that_closes_without_calling_back_is_noticed(
    nats: NatsProcess, stack: AsyncExitStack
) -> None:
    """Some versions of nats-py cancel their own task in `_close`, before the callbacks."""
    client: NatsClient = await open_plane(stack, NatsClient.open, nats.url, OPTIONS)
    await client.wait_connected()
    library_client: Any = client._client
    library_client.options["closed_cb"] = library_client.options["disconnected_cb"] = None
    library_client._closed_cb = library_client._disconnected_cb = None
    await library_client.close()
    async with asyncio.timeout(REPAIR_S + 3):
        while client._client is library_client or not client.connected:
            await asyncio.sleep(0.01)


async def check_writes_to_a_closed_transport(
    nats: NatsProcess, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Write before the library knows that its transport is closed."""
    client: NatsClient = await open_plane(stack, NatsClient.open, nats.url, OPTIONS)
    await client.wait_connected()
    payloads = asyncio.Queue[bytes]()
    for subject in ("ends.closed", "ends.closed.other"):
        client.subscribe(subject, lambda _, payload, *__: payloads.put_nowait(payload))
        library_client: Any = client._client
        library_client._transport._io_writer.transport.abort()
        library_client._flusher_task.cancel()  # the library then writes in the caller's task
        client.publish(subject, b"lost")
        await client.flush()
        async with asyncio.timeout(REPAIR_S + 3):
            while client._client is library_client or not client.connected:
                await asyncio.sleep(0.01)
        client.publish(subject, b"after")
        assert await payloads.get() == b"after"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class TestClosedTransport:
    async def test_writes_are_dropped_and_the_connection_is_repaired(
        self, nats: NatsProcess, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        await check_writes_to_a_closed_transport(nats, stack, caplog)


class TestClosedTransportUvloop:
    async def test_writes_are_dropped_and_the_connection_is_repaired(
        self, nats: NatsProcess, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        await check_writes_to_a_closed_transport(nats, stack, caplog)


@pytest.mark.parametrize("end", ENDS)
async def test_calls_through_nats_succeed_again(
    nats: NatsProcess, stack: AsyncExitStack, end: ConnectionEnd
) -> None:
    relay = await stack.enter_async_context(Relay(nats.port))
    server: Requests = await open_plane(
        stack, open_requests, f"nats://127.0.0.1:{relay.port}", OPTIONS
    )
    client: Requests = await open_plane(stack, open_requests, nats.url, OPTIONS)
    for plane in (server, client):
        await wait_state(plane, up=True)
    await server.serve("e", echo_handler)
    await end_and_reconnect(relay, end)
    await wait_state(server, up=True)
    sink = CollectingSink()
    await client.call(server.address, "e", b"x", Context("r"), sink)
    assert sink.items == [b"x"]


@pytest.mark.parametrize("end", ENDS)
async def test_etcd_watch_goes_on(
    etcd: EtcdProcess, stack: AsyncExitStack, end: ConnectionEnd
) -> None:
    relay = await stack.enter_async_context(Relay(etcd.port))
    owner: Discovery = await open_plane(stack, open_discovery, f"{etcd.url}/ends-{end}", OPTIONS)
    watcher: Discovery = await open_plane(
        stack, open_discovery, f"etcd://127.0.0.1:{relay.port}/ends-{end}", OPTIONS
    )
    async with watcher.watch("/w/") as changes:
        await anext(changes)
        await end_and_reconnect(relay, end)
        await wait_state(watcher, up=True)
        await owner.put("/w/a", b"1")
        async with asyncio.timeout(REPAIR_S + 3):
            while not any(change.key == "/w/a" for change in await anext(changes)):
                pass
