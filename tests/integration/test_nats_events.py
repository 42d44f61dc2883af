"""Events through a real NATS: outages, losses, retention, and the shared connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace
from nats import connect
from nats.js.errors import NotFoundError
from tests.support.servers import NatsProcess

from dynamo.communication.discovery import Discovery
from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.communication.events import Events, open_events
from dynamo.communication.events.protocol import EVENTS, unpack_events
from dynamo.communication.frames import FrameSplitter
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.options import PlaneOptions
from dynamo.communication.requests import Requests
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.runtime import DistributedRuntime
from dynamo_conformance.events import RecordingListener
from dynamo_conformance.requests import CollectingSink, echo_handler

QUICK = PlaneOptions(reconnect_wait_s=0.1)


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


async def wait_connected(plane: Requests | Events, *, up: bool) -> None:
    async with asyncio.timeout(10):
        while bool(plane.connection_error) == up:
            await asyncio.sleep(0.01)


class EventPair:
    """A publisher and a subscriber with the same discovery plane."""

    def __init__(self, publisher: Events, subscriber: Events, discovery: Discovery) -> None:
        self.publisher = publisher
        self.subscriber = subscriber
        self.discovery = discovery


@pytest.fixture
async def pair(nats: NatsProcess, request: pytest.FixtureRequest) -> AsyncIterator[EventPair]:
    discovery = await MemoryDiscovery.open(f"memory:{request.node.name}")
    planes = [await open_events(nats.url, discovery, QUICK) for _ in range(2)]
    for plane in planes:
        await wait_connected(plane, up=True)
    yield EventPair(*planes, discovery)
    for plane in planes:
        await plane.close()
    await discovery.close()


async def test_events_published_during_an_outage_arrive_afterwards(
    nats: NatsProcess, pair: EventPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dynamo.communication.events")
    listener = RecordingListener()
    await pair.subscriber.subscribe("kv", listener)
    source = await pair.publisher.open_source("kv", "w")
    source.publish(b"0")
    await listener.wait_for_payload(b"0")
    nats.kill()
    await wait_connected(pair.publisher, up=False)
    for number in range(1, 50):
        source.publish(b"%d" % number)
        await asyncio.sleep(0)
    while "event source cannot be reached" not in caplog.text:  # until a connection attempt failed
        await asyncio.sleep(0.01)
    nats.start()
    await listener.wait_for_payload(b"49")
    source.publish(b"50")
    await listener.wait_for_payload(b"50")
    assert listener.payloads_of_kind() == [b"%d" % number for number in range(51)]
    assert pair.subscriber.count_lost_events() == 0


async def test_a_lost_last_event_is_recovered_at_the_next_heartbeat(pair: EventPair) -> None:
    listener, dropping = RecordingListener(), False
    plane: Any = pair.subscriber
    plane.lossy = lambda first: dropping
    await pair.subscriber.subscribe("kv", listener)
    source = await pair.publisher.open_source("kv", "w")
    source.publish(b"1")
    await listener.wait_for_payload(b"1")
    dropping = True
    source.publish(b"2")
    await listener.wait_for_payload(b"2")
    assert listener.payloads_of_kind() == [b"1", b"2"]
    assert listener.payloads_of_kind("stale") == [b""]


async def test_events_can_be_read_with_tools_of_nats(nats: NatsProcess, pair: EventPair) -> None:
    client = await NatsClient.open(nats.url, QUICK)
    await client.wait_connected()
    subjects: asyncio.Queue[str] = asyncio.Queue()
    client.subscribe("dynamo.events.>", lambda subject, _, __, ___: subjects.put_nowait(subject))
    source = await pair.publisher.open_source("dynamo.worker.kv_events", "w")
    while subjects.empty():
        source.publish(b"1")
        await asyncio.sleep(0.01)
    assert subjects.get_nowait().startswith("dynamo.events.dynamo.worker.kv_events.")
    await client.close()


async def test_jetstream_retains_events_for_later_subscribers(
    nats: NatsProcess, request: pytest.FixtureRequest
) -> None:
    discovery = await MemoryDiscovery.open(f"memory:{request.node.name}")
    plane = await open_events(nats.url, discovery, replace(QUICK, event_retention_s=60))
    await wait_connected(plane, up=True)
    source = await plane.open_source("retained.worker.kv_events", "w")
    client = await connect(nats.url)
    stream = client.jetstream()

    async def retained_event() -> bytes:
        ordered = await stream.subscribe("dynamo.events.retained.>", ordered_consumer=True)
        try:
            return (await ordered.next_msg(timeout=1)).data
        finally:
            await ordered.unsubscribe()

    async with asyncio.timeout(10):
        while True:
            source.publish(b"the event")
            try:
                data = await retained_event()
                break
            except (NotFoundError, TimeoutError):  # the stream is being created
                await asyncio.sleep(0.05)
    ((kind, count, body),) = FrameSplitter(1 << 20).feed(data)
    assert (kind, unpack_events(body, count)[2][0]) == (EVENTS, b"the event")
    await client.close()
    await plane.close()
    await discovery.close()


async def test_the_planes_of_a_process_share_one_connection(nats: NatsProcess) -> None:
    discovery = f"memory:shared-{nats.port}"
    settings = Settings(
        runtime=RuntimeSettings(discovery=discovery, requests=nats.url, events=nats.url)
    )
    async with await DistributedRuntime.create(settings) as runtime:
        await wait_connected(runtime.requests, up=True)
        assert not runtime.unreachable_planes()
        requests, events = cast("Any", runtime.requests), cast("Any", runtime.events)
        assert requests._nats is events._nats
        listener = RecordingListener()
        await runtime.events.subscribe("kv", listener)
        source = await runtime.events.open_source("kv", "w")
        source.publish(b"1")
        await listener.wait_for_payload(b"1")
        await runtime.requests.serve("e", echo_handler)
        sink = CollectingSink()
        await runtime.requests.call(runtime.requests.address, "e", b"x", Context("r"), sink)
        assert sink.items == [b"x"]
