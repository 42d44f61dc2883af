"""Faults of a real NATS and of the network to it: outages, partitions, lost messages."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.support.relay import Relay
from tests.support.servers import NatsProcess, free_port

from dynamo.communication.discovery import Discovery
from dynamo.communication.events import Events
from dynamo.communication.events.nats import subject_token
from dynamo.communication.frames import HELLO
from dynamo.communication.handshake import pack_hello
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.nats_transport import NatsPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.requests import Requests, open_requests
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InstanceGone, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo_conformance.requests import CollectingSink, EndlessHandler, echo_handler

CONTEXT = Context("request-1")
QUICK = PlaneOptions(reconnect_wait_s=0.1)
Plane = Requests | Events | Discovery | NatsClient


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


@pytest.fixture
async def opened(nats: NatsProcess) -> AsyncIterator[list[Any]]:
    planes: list[Any] = []
    yield planes
    for plane in planes:
        await plane.close()


async def requests(
    nats: NatsProcess, opened: list[Any], port: int = 0, options: PlaneOptions = QUICK
) -> Requests:
    plane = await open_requests(f"nats://127.0.0.1:{port or nats.port}", options)
    opened.append(plane)
    await wait_connected(plane, up=True)
    return plane


async def wait_connected(plane: Plane, *, up: bool) -> None:
    async with asyncio.timeout(10):
        while bool(plane.connection_error) == up:
            await asyncio.sleep(0.01)


async def ask(client: Requests, server: Requests) -> list[bytes]:
    sink = CollectingSink()
    await client.call(server.address, "e", b"x", CONTEXT, sink)
    return sink.items


async def test_calls_go_directly_during_an_outage_and_no_connection_is_reported_broken(
    nats: NatsProcess, opened: list[Any]
) -> None:
    server, client = await requests(nats, opened), await requests(nats, opened)
    await server.serve("e", echo_handler)
    broken: list[str] = []
    client.on_connection_broken(broken.append)
    assert await ask(client, server) == [b"x"]
    nats.kill()
    await wait_connected(client, up=False)
    assert await ask(client, server) == [b"x"]
    nats.start()
    await wait_connected(client, up=True)
    assert await ask(client, server) == [b"x"]
    await wait_connected(server, up=True)
    assert await ask(client, server) == [b"x"]
    assert broken == []


async def test_a_stream_fails_when_nats_dies_and_its_handler_is_cancelled(
    nats: NatsProcess, opened: list[Any]
) -> None:
    server, client = await requests(nats, opened), await requests(nats, opened)
    handler, sink = EndlessHandler(), CollectingSink()
    await server.serve("e", handler)
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        call = tasks.start(client.call(server.address, "e", b"", CONTEXT, sink))
        await sink.first_item.wait()
        nats.kill()
        with pytest.raises(WorkerFailed) as caught:
            await call
        assert not isinstance(caught.value, InstanceGone)
        await handler.cancelled.wait()
    nats.start()


WORKER = """
import asyncio, sys
from dynamo.communication.requests import open_requests

async def endless(payload, out):
    out.send(b"first")
    await asyncio.Event().wait()

async def main():
    plane = await open_requests(sys.argv[1])
    await plane.serve("e", endless)
    while plane.connection_error:
        await asyncio.sleep(0.01)
    print(plane.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_process_is_detected_by_returned_messages(
    nats: NatsProcess, opened: list[Any]
) -> None:
    client = await requests(nats, opened)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, nats.url, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    broken = asyncio.Event()
    client.on_connection_broken(lambda _: broken.set())
    sink = CollectingSink()
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        call = tasks.start(client.call(address, "e", b"", CONTEXT, sink))
        await sink.first_item.wait()
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(3):
            with pytest.raises(WorkerFailed):
                await call
            await broken.wait()
    await child.wait()


async def test_an_instance_partitioned_from_nats_is_called_directly(
    nats: NatsProcess, opened: list[Any]
) -> None:
    async with Relay(nats.port) as relay:
        server = await requests(nats, opened, relay.port)
        client = await requests(nats, opened)
        await server.serve("e", echo_handler)
        assert await ask(client, server) == [b"x"]
        relay.silent = True
        relay.abort_connections()
        await wait_connected(server, up=False)
        broken: list[str] = []
        client.on_connection_broken(broken.append)
        with suppress(WorkerFailed):  # if the partition is not detected yet
            await ask(client, server)
        assert await ask(client, server) == [b"x"]
        relay.silent = False
        await wait_connected(server, up=True)
        assert await ask(client, server) == [b"x"]
        assert broken == []


async def test_a_frozen_server_is_detected_and_calls_go_directly(
    nats: NatsProcess, opened: list[Any]
) -> None:
    server, client = await requests(nats, opened), await requests(nats, opened)
    await server.serve("e", echo_handler)
    assert await ask(client, server) == [b"x"]
    nats.signal(signal.SIGSTOP)
    try:
        await wait_connected(client, up=False)
        assert "does not answer" in client.connection_error
        assert await ask(client, server) == [b"x"]
    finally:
        nats.signal(signal.SIGCONT)
    await wait_connected(client, up=True)
    await wait_connected(server, up=True)
    assert await ask(client, server) == [b"x"]


async def test_an_instance_with_a_silent_nats_is_reached_directly(
    nats: NatsProcess, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance has not detected the fault, so NATS still has its subscriptions."""
    monkeypatch.setattr("dynamo.communication.nats_client.PING_TIMEOUT_S", 60.0)
    async with Relay(nats.port) as relay:
        server = await requests(nats, opened, relay.port)
        client = await requests(nats, opened)
        handler, sink = EndlessHandler(), CollectingSink()
        await server.serve("endless", handler)
        await server.serve("e", echo_handler)
        async with BackgroundTasks(on_failure=lambda _: None) as tasks:
            call = tasks.start(client.call(server.address, "endless", b"", CONTEXT, sink))
            await sink.first_item.wait()
            relay.silent = True
            assert await client.probe_directly(server.address, "unknown endpoint")
            client.bypass(server.address)
            with pytest.raises(WorkerFailed):
                await call
        assert await ask(client, server) == [b"x"]
        relay.silent = False
    gone = server.address.replace("tcp://", "tcp://127.0.0.1:1/", 1)
    assert not await client.probe_directly(gone, "e")


async def test_a_new_connection_does_not_wait_for_a_frozen_nats(
    nats: NatsProcess, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither end has noticed yet that NATS is frozen."""
    monkeypatch.setattr("dynamo.communication.nats_client.PING_TIMEOUT_S", 60.0)
    server, client = await requests(nats, opened), await requests(nats, opened)
    await server.serve("e", echo_handler)
    nats.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert await ask(client, server) == [b"x"]
        late = await open_requests(nats.url, QUICK)
        opened.append(late)
        assert await ask(late, server) == [b"x"]
        assert time.monotonic() - started < 3
    finally:
        nats.signal(signal.SIGCONT)
    await wait_connected(late, up=True)
    assert await ask(late, server) == [b"x"]


async def test_a_lost_message_breaks_the_connection(nats: NatsProcess, opened: list[Any]) -> None:
    ends = [await NatsClient.open(nats.url, QUICK) for _ in range(2)]
    opened += ends
    for end in ends:
        await end.wait_connected()
    server, client = (TcpRequests(NatsPlaneTransport(end, QUICK)) for end in ends)
    await server.serve("e", echo_handler)
    sink = CollectingSink()
    await client.call(server.address, "e", b"1", CONTEXT, sink)
    publish = ends[1].publish
    dropped: list[bytes] = []

    def drop_once(subject: str, payload: bytes, reply: str = "") -> None:
        if payload[0] == 2 and not dropped:
            dropped.append(payload)
        else:
            publish(subject, payload, reply)

    ends[1].publish = drop_once  # type: ignore[method-assign]
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        lost = tasks.start(client.call(server.address, "e", b"2", CONTEXT, sink))
        while not dropped:
            await asyncio.sleep(0)
        with pytest.raises(WorkerFailed):
            await client.call(server.address, "e", b"3", CONTEXT, sink)
        with pytest.raises(WorkerFailed):
            await lost
    await client.call(server.address, "e", b"4", CONTEXT, sink)
    assert sink.items == [b"1", b"4"]
    await client.close()
    await server.close()


async def test_connections_through_nats_need_the_secret(
    nats: NatsProcess, opened: list[Any]
) -> None:
    options = PlaneOptions(secret="0123456789abcdef", reconnect_wait_s=0.1)
    server = await requests(nats, opened, options=options)
    await server.serve("e", echo_handler)
    with pytest.raises(InstanceGone, match="secret"):
        await ask(await requests(nats, opened), server)
    assert await ask(await requests(nats, opened, options=options), server) == [b"x"]


async def test_nats_may_start_after_its_clients(opened: list[Any]) -> None:
    server = NatsProcess()
    planes = [await open_requests(server.url, QUICK) for _ in range(2)]
    opened += planes
    await planes[0].serve("e", echo_handler)
    assert await ask(planes[1], planes[0]) == [b"x"]
    assert "NATS at" in planes[0].connection_error
    with server:
        await wait_connected(planes[1], up=True)
        assert await ask(planes[1], planes[0]) == [b"x"]


async def test_invalid_urls_raise() -> None:
    for url in ("nats://", "nats:"):
        with pytest.raises(ConfigError):
            await open_requests(url)
    plane = await open_requests(f"nats://127.0.0.1:{free_port()}", DEFAULT_OPTIONS)
    await plane.close()


def test_a_name_is_encoded_as_one_subject_token() -> None:
    assert subject_token("kv_events") == "kv_events"
    assert subject_token("a.b c*>") == "a%2Eb%20c%2A%3E"
    assert subject_token("") == "%"


async def test_an_unauthenticated_client_gets_no_data_and_breaks_nothing(
    nats: NatsProcess, opened: list[Any]
) -> None:
    options = PlaneOptions(secret="0123456789abcdef", reconnect_wait_s=0.1)
    server = await requests(nats, opened, options=options)
    client = await requests(nats, opened, options=options)
    await server.serve("e", echo_handler)
    stranger = await NatsClient.open(nats.url, QUICK)
    opened.append(stranger)
    await stranger.wait_connected()
    received: list[bytes] = []
    stranger.subscribe("mine", lambda _, payload, __, ___: received.append(payload))
    incarnation = server.address.removeprefix("nats://").partition("/")[0]
    for piece in (b"\1", b"\2" + bytes(4) + pack_hello("requests")):
        subject = f"dynamo.wire.{incarnation}.a.{'f' * 16}"
        stranger.publish(subject, piece.ljust(5, b"\0"), "mine")
    rng = random.Random(3)
    bodies = [pack_hello("requests"), pack_hello("events"), b"GET / HTTP/1.1\r\n\r\n", b""]
    for number in range(300):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(0, 4)):
            body[rng.randrange(len(body) or 1) : 0] = rng.randbytes(1)
        kind, position = rng.choice([1, 1, 2, 2, 3, 4, 5, 9]), rng.randrange(3)
        subject = f"dynamo.wire.{incarnation}.{rng.choice('ad')}.{number // 4:016x}"
        stranger.publish(
            subject, bytes([kind]) + position.to_bytes(4, "little") + bytes(body), "mine"
        )
        stranger.publish(subject, bytes(body)[:3])
        if not number % 50:
            assert await ask(client, server) == [b"x"]
    assert await ask(client, server) == [b"x"]
    frames = [payload[5:] for payload in received if payload[:1] == b"\2"]
    assert {frame[4] for frame in frames} == {HELLO}
