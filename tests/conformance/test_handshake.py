"""Handshakes that never end, are nested, fail below TLS or come from another protocol version."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec
import pytest
from tests.conformance.test_planes_secret import (
    CONTEXT,
    SECRET,
    read_all,
    tls_of,
    works,
)
from tests.conformance.test_planes_secret import certificates as certificates
from tests.conformance.test_planes_secret import guarded as guarded

from dynamo.communication import handshake
from dynamo.communication.addresses import parse_address
from dynamo.communication.frames import HELLO, FrameSplitter, pack_frame
from dynamo.communication.handshake import Hello, pack_hello
from dynamo.communication.options import PlaneOptions
from dynamo.communication.requests import open_requests, protocol
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.communication.transports import MAX_UNPROVEN_LINKS
from dynamo.core.errors import InstanceGone
from dynamo_conformance.requests import echo_handler

NESTED = b"\x91" * 5000


def nested_open_frame() -> bytes:
    """Return an OPEN frame whose header has a deeply nested field of a later version."""
    header = (
        b"\x94" + msgspec.msgpack.encode("e") + msgspec.msgpack.encode(CONTEXT) + b"\0" + NESTED
    )
    return pack_frame(protocol.OPEN, struct.pack("<II", 1, len(header)) + header)


async def test_the_oldest_unproven_connections_are_closed(guarded: TcpRequests) -> None:
    address = parse_address(guarded.address)
    readers, writers = [], []
    for _ in range(MAX_UNPROVEN_LINKS + 72):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        readers.append(reader)
        writers.append(writer)
        writer.write(pack_hello("requests", nonce=b"n" * 16))
    for reader in readers[:72]:
        await asyncio.wait_for(read_all(reader), 5)
    assert len(guarded._server_connections) == MAX_UNPROVEN_LINKS
    assert await asyncio.wait_for(works(guarded), 5)
    for writer in writers:
        writer.close()


async def test_proven_connections_do_not_count(guarded: TcpRequests) -> None:
    clients = [await open_requests("tcp:", SECRET) for _ in range(MAX_UNPROVEN_LINKS + 8)]
    for client in clients:
        await client.ensure_connected(guarded.address)
    assert len(guarded._server_connections) == len(clients)
    for client in clients:
        await client.close()


async def test_a_failed_tls_handshake_leaves_nothing(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    plane = await TcpRequests.open("tcp:", tls_of(certificates))
    await plane.serve("e", echo_handler)
    address = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(pack_hello("requests"))
    await read_all(reader)
    writer.close()
    async with asyncio.timeout(5):
        while plane._server_connections:
            await asyncio.sleep(0.01)
    await plane.close()


@pytest.mark.parametrize(
    "frames",
    [
        [pack_frame(HELLO, b"\x81\xa1z" + NESTED)],
        [pack_hello("requests"), nested_open_frame()],
    ],
)
async def test_deeply_nested_frames_end_their_connection_only(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    plane = await TcpRequests.open("tcp:")
    await plane.serve("e", echo_handler)
    address = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.writelines(frames)
    await asyncio.wait_for(read_all(reader), 5)
    writer.close()
    assert await works(plane, PlaneOptions())
    assert [record.message for record in caplog.records] == ["connection aborted: protocol error"]
    assert not caplog.records[0].exc_info
    await plane.close()


async def test_a_nested_hello_of_a_server_fails_the_call_at_once() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame(HELLO, b"\x81\xa1z" + NESTED))
        await read_all(reader)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = await open_requests("tcp:", SECRET)
    with pytest.raises(InstanceGone, match="unreadable hello"):
        await client.call(f"tcp://127.0.0.1:{port}/i", "e", b"x", CONTEXT, lambda _: True)
    await client.close()
    server.close()


async def prove_by_hand(guarded: TcpRequests, incarnation: str) -> list[int]:
    """Complete a handshake frame by frame and call an endpoint. Returns the kinds of all frames."""
    address = parse_address(guarded.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    hello = Hello("requests", "dynamo", nonce=b"n" * 16)
    writer.write(pack_frame(HELLO, msgspec.msgpack.encode(hello)))
    splitter = FrameSplitter()
    ((_, _, body),) = splitter.feed(await reader.read(4096))
    answer = handshake.decode_hello(HELLO, body, "requests")
    covered = "requests", hello.nonce, answer.nonce, incarnation
    assert answer.proof == handshake.compute_proof(SECRET.secret, "listener", *covered)
    proof = handshake.compute_proof(SECRET.secret, "dialler", *covered)
    writer.write(pack_frame(255, proof) + protocol.pack_open(1, "e", CONTEXT, 0, b"x"))
    frames = splitter.feed(await asyncio.wait_for(reader.read(4096), 5))
    writer.close()
    return [kind for kind, _, _ in frames]


async def test_proofs_cover_the_incarnation(guarded: TcpRequests) -> None:
    incarnation = parse_address(guarded.address).incarnation
    assert await prove_by_hand(guarded, incarnation) == [protocol.DATA]
