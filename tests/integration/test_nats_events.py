"""Events through a real NATS: away, lossy, kept, read by others; what they share with requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace
from nats import connect
from nats.js.errors import NotFoundError

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
from dynamo.testing.conformance.events import RecordingListener
from dynamo.testing.conformance.requests import CollectingSink, echo_handler
from dynamo.testing.servers import NatsProcess

QUICK = PlaneOptions(reconnect_wait_s=0.1)


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsProcess]:
    with NatsProcess() as server:
        yield server


async def state(plane: Requests | Events, *, up: bool) -> None:
    async with asyncio.timeout(10):
        while bool(plane.connection_error) == up:
            await asyncio.sleep(0.01)


class Events2:
    """A publisher and a subscriber with one directory."""

    def __init__(self, publisher: Events, subscriber: Events, directory: Discovery) -> None:
        self.publisher = publisher
        self.subscriber = subscriber
        self.directory = directory


@pytest.fixture
async def pair(nats: NatsProcess, request: pytest.FixtureRequest) -> AsyncIterator[Events2]:
    place = await MemoryDiscovery.open(f"memory:{request.node.name}")
    planes = [await open_events(nats.url, place, QUICK) for _ in range(2)]
    for plane in planes:
        await state(plane, up=True)
    yield Events2(*planes, place)
    for plane in planes:
        await plane.close()
    await place.close()


async def test_what_is_published_while_nats_is_away_arrives_afterwards(
    nats: NatsProcess, pair: Events2, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dynamo.communication.events")
    heard = RecordingListener()
    await pair.subscriber.subscribe("kv", heard)
    source = await pair.publisher.open_source("kv", "w")
    source.publish(b"0")
    await heard.wait_for_payload(b"0")
    nats.kill()
    await state(pair.publisher, up=False)
    for number in range(1, 50):
        source.publish(b"%d" % number)
        await asyncio.sleep(0)
    while "event source cannot be reached" not in caplog.text:  # it is dialled in vain
        await asyncio.sleep(0.01)
    nats.start()
    await heard.wait_for_payload(b"49")
    source.publish(b"50")
    await heard.wait_for_payload(b"50")
    assert heard.payloads_of_kind() == [b"%d" % number for number in range(51)]
    assert pair.subscriber.count_lost_events() == 0


async def test_the_last_event_is_missed_for_a_beat_only(pair: Events2) -> None:
    heard, dropping = RecordingListener(), False
    plane: Any = pair.subscriber
    plane.lossy = lambda first: dropping
    await pair.subscriber.subscribe("kv", heard)
    source = await pair.publisher.open_source("kv", "w")
    source.publish(b"1")
    await heard.wait_for_payload(b"1")
    dropping = True
    source.publish(b"2")
    await heard.wait_for_payload(b"2")
    assert heard.payloads_of_kind() == [b"1", b"2"]
    assert heard.payloads_of_kind("stale") == [b""]


async def test_events_may_be_read_with_natss_own_tools(nats: NatsProcess, pair: Events2) -> None:
    link = await NatsClient.open(nats.url, QUICK)
    await link.wait_connected()
    subjects: asyncio.Queue[str] = asyncio.Queue()
    link.subscribe("dynamo.events.>", lambda subject, _, __, ___: subjects.put_nowait(subject))
    source = await pair.publisher.open_source("dynamo.worker.kv_events", "w")
    while subjects.empty():
        source.publish(b"1")
        await asyncio.sleep(0.01)
    assert subjects.get_nowait().startswith("dynamo.events.dynamo.worker.kv_events.")
    await link.close()


async def test_jetstream_keeps_events_for_who_comes_later(
    nats: NatsProcess, request: pytest.FixtureRequest
) -> None:
    place = await MemoryDiscovery.open(f"memory:{request.node.name}")
    plane = await open_events(nats.url, place, replace(QUICK, event_retention_s=60))
    await state(plane, up=True)
    source = await plane.open_source("kept.worker.kv_events", "w")
    client = await connect(nats.url)
    stream = client.jetstream()

    async def kept() -> list[bytes]:
        ordered = await stream.subscribe("dynamo.events.kept.>", ordered_consumer=True)
        try:
            return [(await ordered.next_msg(timeout=1)).data]
        finally:
            await ordered.unsubscribe()

    async with asyncio.timeout(10):
        while True:
            source.publish(b"the event")
            try:
                found = await kept()
                break
            except (NotFoundError, TimeoutError):  # the stream is being made
                await asyncio.sleep(0.05)
    ((kind, count, body),) = FrameSplitter(1 << 20).feed(found[0])
    assert (kind, unpack_events(body, count)[2][0]) == (EVENTS, b"the event")
    await client.close()
    await plane.close()
    await place.close()


async def test_the_planes_of_a_process_share_one_connection(nats: NatsProcess) -> None:
    place = f"memory:shared-{nats.port}"
    settings = Settings(
        runtime=RuntimeSettings(discovery=place, requests=nats.url, events=nats.url)
    )
    async with await DistributedRuntime.create(settings) as runtime:
        await state(runtime.requests, up=True)
        assert not runtime.unreachable_planes()
        one, other = cast("Any", runtime.requests), cast("Any", runtime.events)
        assert one._nats is other._nats
        heard = RecordingListener()
        await runtime.events.subscribe("kv", heard)
        source = await runtime.events.open_source("kv", "w")
        source.publish(b"1")
        await heard.wait_for_payload(b"1")
        await runtime.requests.serve("e", echo_handler)
        got = CollectingSink()
        await runtime.requests.call(runtime.requests.address, "e", b"x", Context("r"), got)
        assert got.items == [b"x"]
