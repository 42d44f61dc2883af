"""Tests of TCP events alone: slow subscribers, broken connections, bad peers and records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo.communication.addresses import parse_address
from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.communication.events import protocol
from dynamo.communication.events.records import KEY_ROOT, parse_record
from dynamo.communication.events.tcp import MAX_PENDING_BYTES, TcpEvents
from dynamo.communication.frames import HELLO, MAX_FRAME_BYTES, FrameSplitter, pack_frame
from dynamo.communication.handshake import pack_hello
from dynamo_conformance.events import RecordingListener


@pytest.fixture
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[MemoryDiscovery]:
    discovery = await MemoryDiscovery.open(f"memory:{request.node.name}")
    yield discovery
    await discovery.close()


@pytest.fixture
async def plane(directory: MemoryDiscovery) -> AsyncIterator[TcpEvents]:
    plane = await TcpEvents.open("tcp:", directory)
    yield plane
    await plane.close()


async def test_events_for_a_slow_subscriber_are_skipped(
    plane: TcpEvents, directory: MemoryDiscovery
) -> None:
    source = await plane.open_source("kv", "w")
    ((_, value),) = (await directory.get(KEY_ROOT)).items()
    record = parse_record(value)
    address = parse_address(record.address)
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 16)
    writer.write(pack_hello("events") + protocol.pack_position(protocol.FOLLOW, record.number, -1))
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    frames: list[tuple[int, int, bytes]] = []
    while not frames or frames[-1][0] != protocol.CAUGHT_UP:
        frames += splitter.feed(await reader.read(65536))
    (subscriber,) = plane._subscribers
    for _ in range(400):
        source.publish(bytes(100_000))
        await asyncio.sleep(0)
    assert subscriber.link.transport is not None
    assert subscriber.link.transport.get_write_buffer_size() <= MAX_PENDING_BYTES + 200_000
    while frames[-1][0] != protocol.SKIPPED:
        frames += splitter.feed(await reader.read(1 << 20))
    assert protocol.unpack_position(frames[-1][2]) == (record.number, 400)
    assert sum(frame[0] == protocol.EVENTS for frame in frames) < 400
    writer.close()


async def test_a_reconnect_repairs_missed_events(
    plane: TcpEvents, directory: MemoryDiscovery
) -> None:
    other, listener = await TcpEvents.open("tcp:", directory), RecordingListener()
    source = await plane.open_source("kv", "w", lambda: [b"state"])
    await other.subscribe("kv", listener)
    await listener.wait_for_kind("dump")
    source.publish(b"1")
    await listener.wait_for_payload(b"1")
    for subscriber in plane._subscribers:
        subscriber.link.abort()
    source.publish(b"2")
    source.publish(b"3")
    await listener.wait_for_payload(b"3")
    assert listener.payloads_of_kind() == [b"1", b"2", b"3"]
    assert [event.kind for event in listener.events] == ["dump", "event", "stale", "event", "event"]
    await other.close()


async def test_a_reconnect_without_missed_events_reports_repaired(
    plane: TcpEvents, directory: MemoryDiscovery
) -> None:
    other, listener = await TcpEvents.open("tcp:", directory), RecordingListener()
    await plane.open_source("kv", "w", lambda: [b"state"])
    await other.subscribe("kv", listener)
    await listener.wait_for_kind("dump")
    for subscriber in plane._subscribers:
        subscriber.link.abort()
    await listener.wait_for_kind("repaired")
    assert [event.kind for event in listener.events] == ["dump", "stale", "repaired"]
    await other.close()


async def test_a_crashed_publisher_is_gone_when_its_lease_expires(
    plane: TcpEvents, directory: MemoryDiscovery, request: pytest.FixtureRequest
) -> None:
    crashing_directory = await MemoryDiscovery.open(f"memory:{request.node.name}")
    crashing, listener = await TcpEvents.open("tcp:", crashing_directory), RecordingListener()
    await crashing.open_source("kv", "w", lambda: [b"state"])
    await plane.subscribe("kv", listener)
    await listener.wait_for_kind("dump")
    crashing.abort()
    await listener.wait_for_kind("stale")
    crashing_directory.lose_lease()
    await listener.wait_for_kind("gone")
    await crashing.close()
    await crashing_directory.close()


async def test_bad_records_are_skipped_with_a_warning(
    plane: TcpEvents, directory: MemoryDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    await directory.put(f"{KEY_ROOT}kv/nonsense", b"{}")
    await directory.put(f"{KEY_ROOT}kv/w/12", b"not json")
    await directory.put(
        f"{KEY_ROOT}kv/w/13", b'{"address":"tcp://127.0.0.1:1/x","number":1,"new":2}'
    )
    await directory.put(f"{KEY_ROOT}kv/x/13", b'{"address":"elsewhere","number":1}')
    listener = RecordingListener()
    await plane.subscribe("kv", listener)
    source = await plane.open_source("kv", "good")
    source.publish(b"1")
    await listener.wait_for_payload(b"1")
    assert caplog.text.count("bad event source skipped") == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        pack_hello("requests"),
        pack_hello("events") + pack_frame(protocol.FOLLOW, b"short"),
        pack_hello("events") + pack_frame(protocol.EVENTS, b""),
        pack_frame(HELLO, b""),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_disconnected(
    plane: TcpEvents, garbage: bytes
) -> None:
    listener = RecordingListener()
    await plane.subscribe("kv", listener)
    source = await plane.open_source("kv", "w")
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", parse_address(plane._transport.address).port
    )
    writer.write(garbage)
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    writer.close()
    source.publish(b"1")
    await listener.wait_for_payload(b"1")
