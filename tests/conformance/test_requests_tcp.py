"""Tests of TCP requests alone: frames, handshakes, bad peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from dynamo.communication import handshake, link
from dynamo.communication.addresses import parse_address
from dynamo.communication.frames import (
    END_STREAM,
    HELLO,
    MAX_FRAME_BYTES,
    Frame,
    FrameSplitter,
    pack_frame,
    unpack_items,
)
from dynamo.communication.handshake import MAGIC, VERSION, pack_hello
from dynamo.communication.requests import ResponseWriter, open_requests, protocol
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.context import Context
from dynamo.core.errors import (
    ConfigError,
    InstanceGone,
    ProtocolError,
    WorkerFailed,
    decode_error,
)
from dynamo.core.tasks import BackgroundTasks, run_all

CONTEXT = Context("r")


async def echo(payload: bytes, writer: ResponseWriter) -> None:
    writer.send(payload)


@pytest.fixture
async def server() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:")
    await plane.serve("echo", echo)
    yield plane
    await plane.close()


@pytest.fixture
async def client() -> AsyncIterator[TcpRequests]:
    plane = await TcpRequests.open("tcp:")
    yield plane
    await plane.close()


class RawPeer:
    """A peer that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._frames: list[Frame] = []

    async def frame(self) -> Frame:
        while not self._frames:
            data = await self.reader.read(65536)
            if not data:
                raise EOFError
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    async def closed(self) -> bool:
        try:
            while True:
                await self.frame()
        except (EOFError, ConnectionError):
            return True


@asynccontextmanager
async def connect_raw(plane: TcpRequests, *first: bytes) -> AsyncIterator[RawPeer]:
    address = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"".join(first))
    try:
        yield RawPeer(reader, writer)
    finally:
        writer.close()


async def works(client: TcpRequests, server: TcpRequests) -> bool:
    received: list[bytes] = []
    await client.call(
        server.address, "echo", b"x", CONTEXT, lambda payload: received.append(payload) is None
    )
    return received == [b"x"]


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes(64),
    pack_frame(HELLO, b"\xff\xff"),
    pack_frame(HELLO, msgspec.msgpack.encode({"magic": MAGIC, "plane": "events"})),
    pack_frame(protocol.OPEN, b"before the hello"),
    pack_hello("requests") + pack_frame(protocol.OPEN, b"\x01"),
    pack_hello("requests") + pack_frame(protocol.OPEN, b"\x01\0\0\0\xff\xff\0\0"),
    pack_hello("requests") + pack_frame(protocol.OPEN, b"\x01\0\0\0\x01\0\0\0\xc1"),
    pack_hello("requests") + pack_frame(protocol.CANCEL, b"123"),
    pack_hello("requests") + pack_frame(protocol.CREDIT, b"123"),
    pack_hello("requests") + pack_frame(200, b""),
    pack_hello("requests") + b"\xff\xff\xff\xff\0\0\0\0",
    pack_hello("requests") + 2 * protocol.pack_open(7, "echo", CONTEXT, 0, b""),
    pack_hello("requests") + pack_frame(protocol.SHARE, b"short"),
    pack_hello("requests") + 2 * protocol.pack_share(7, b"x"),
    pack_hello("requests") + pack_frame(protocol.RELEASE, b"short"),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_peer_that_breaks_the_protocol_is_disconnected(
    server: TcpRequests, client: TcpRequests, garbage: bytes
) -> None:
    assert await works(client, server)
    async with connect_raw(server, garbage) as peer:
        assert await peer.closed()
    assert await works(client, server)


async def test_items_of_one_loop_iteration_share_a_frame(server: TcpRequests) -> None:
    started: list[ResponseWriter] = []
    ready, over = asyncio.Event(), asyncio.Event()

    async def hold(payload: bytes, writer: ResponseWriter) -> None:
        started.append(writer)
        if len(started) == 20:
            ready.set()
        await over.wait()

    await server.serve("hold", hold)
    openings = [protocol.pack_open(number, "hold", CONTEXT, 0, b"") for number in range(1, 21)]
    async with connect_raw(server, pack_hello("requests"), *openings) as peer:
        assert (await peer.frame())[0] == HELLO
        await ready.wait()
        for writer in started:
            writer.send(b"token")
        kind, count, body = await peer.frame()
        assert (kind, count) == (protocol.DATA, 20)
        assert list(unpack_items(body, count)) == [(n, 0, b"token") for n in range(1, 21)]
        over.set()
        kind, count, body = await peer.frame()
        assert {(flags, payload) for _, flags, payload in unpack_items(body, count)} == {
            (END_STREAM, b"")
        }


async def test_a_hello_of_the_next_version_is_understood(server: TcpRequests) -> None:
    hello = {"magic": MAGIC, "plane": "requests", "version": VERSION + 1, "oldest": VERSION, "x": 1}
    async with connect_raw(server, pack_frame(HELLO, msgspec.msgpack.encode(hello))) as peer:
        assert (await peer.frame())[0] == HELLO
        peer.writer.write(protocol.pack_open(1, "echo", CONTEXT, 0, b"x"))
        assert (await peer.frame())[0] == protocol.DATA


async def test_a_hello_of_another_version_is_answered_and_refused(server: TcpRequests) -> None:
    hello = {"magic": MAGIC, "plane": "requests", "version": 99, "oldest": 98}
    async with connect_raw(server, pack_frame(HELLO, msgspec.msgpack.encode(hello))) as peer:
        assert (await peer.frame())[0] == HELLO
        assert await peer.closed()


async def test_an_unknown_shared_payload_fails_its_call_only(server: TcpRequests) -> None:
    frames = (
        protocol.pack_release(7),
        protocol.pack_open(1, "echo", CONTEXT, 0, b"x", 7),
        protocol.pack_share(7, b"common"),
        protocol.pack_open(2, "echo", CONTEXT, 0, b"x", 7),
    )
    async with connect_raw(server, pack_hello("requests"), *frames) as peer:
        assert (await peer.frame())[0] == HELLO
        items = []
        while len(items) < 3:
            _, count, body = await peer.frame()
            items += unpack_items(body, count)
    assert [(stream, flags) for stream, flags, _ in items] == [
        (1, END_STREAM),
        (2, 0),
        (2, END_STREAM),
    ]
    assert isinstance(decode_error(items[0][2]), ProtocolError)


async def test_concurrent_callers_share_one_connection(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await run_all(*(works(client, server) for _ in range(50))) == [True] * 50
    assert len(server._server_connections) == 1


async def test_cancelling_the_first_caller_does_not_cancel_the_dial(
    server: TcpRequests, client: TcpRequests
) -> None:
    first = client._tasks.start(works(client, server))
    second = client._tasks.start(works(client, server))
    await asyncio.sleep(0)
    first.cancel()
    assert await second


async def test_another_incarnation_is_gone(server: TcpRequests, client: TcpRequests) -> None:
    address = server.address.rsplit("/", 1)[0]
    with pytest.raises(InstanceGone):
        await client.call(f"{address}/0123456789abcdef", "echo", b"", CONTEXT, lambda _: True)
    assert await works(client, server)


async def test_a_silent_server_is_gone(
    client: TcpRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(InstanceGone):
        await client.call(f"tcp://127.0.0.1:{port}/abc", "echo", b"", CONTEXT, lambda _: True)
    silent.close()
    for writer in writers:
        writer.close()


async def test_a_connection_without_stream_ids_left_is_replaced(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await works(client, server)
    (connection,) = client._client_connections.values()
    connection.streams._last_stream_id = protocol.MAX_STREAM_ID - 1
    assert await works(client, server)
    assert await works(client, server)
    assert connection not in client._client_connections.values()
    await connection.link.closed.wait()


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:1", "tcp://[::]:0", "tcp://x:y"]
)
async def test_listening_beyond_loopback_requires_a_secret(url: str) -> None:
    with pytest.raises(ConfigError):
        await open_requests(url)


async def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown") as caught:
        await open_requests("tpc://127.0.0.1:0")
    assert "tcp" in caught.value.hint


async def test_a_peer_that_reads_nothing_does_not_delay_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "CLOSE_TIMEOUT_S", 0.05)
    server = await TcpRequests.open("tcp:")
    sent = asyncio.Event()

    async def pour(payload: bytes, writer: ResponseWriter) -> None:
        writer.send(bytes(32 << 20))
        sent.set()
        await asyncio.Event().wait()

    await server.serve("pour", pour)
    opening = protocol.pack_open(1, "pour", CONTEXT, 0, b"")
    async with connect_raw(server, pack_hello("requests"), opening) as peer:
        peer.writer.transport.pause_reading()
        await sent.wait()
        await server.close()


@asynccontextmanager
async def accepting() -> AsyncIterator[tuple[str, asyncio.Queue[asyncio.StreamReader]]]:
    """Yield the address of a silent server, and a queue of its connections' readers."""
    connected: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.put_nowait(reader)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield f"tcp://127.0.0.1:{port}/abc", connected
    server.close()
    for writer in writers:
        writer.close()


async def test_a_server_without_a_hello_is_reported_as_no_answer(
    client: TcpRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.01)
    async with accepting() as (address, _):
        with pytest.raises(InstanceGone, match="cannot be reached: no answer"):
            await client.call(address, "echo", b"", CONTEXT, lambda _: True)


async def test_closing_while_dialling_leaves_no_connection(client: TcpRequests) -> None:
    async with accepting() as (address, connected), BackgroundTasks() as tasks:
        call = tasks.start(client.call(address, "echo", b"", CONTEXT, lambda _: True))
        reader = await connected.get()
        await client.close()
        with pytest.raises(InstanceGone):
            await call
        with suppress(ConnectionError):
            await reader.read()


async def test_a_retired_connection_closes_with_its_last_call(
    server: TcpRequests, client: TcpRequests
) -> None:
    async with hanging(server, client) as call:
        (connection,) = client._client_connections.values()
        await server.withdraw("echo")
        withdrawn = server._tasks.start(server.withdraw("hang", None))
        while client._client_connections:
            await asyncio.sleep(0)
        call.cancel()
        await connection.link.closed.wait()
        await withdrawn


async def test_closing_fails_the_calls_of_a_retired_connection(
    server: TcpRequests, client: TcpRequests
) -> None:
    async with hanging(server, client) as call:
        await server.withdraw("echo")
        server._tasks.start(server.withdraw("hang", None))
        while client._client_connections:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(WorkerFailed):
            await call


async def test_a_call_on_a_closing_connection_is_not_sent(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await works(client, server)
    (connection,) = client._client_connections.values()
    connection.retire()
    with pytest.raises(InstanceGone):
        await connection.streams.call("echo", b"", CONTEXT, lambda _: True, None)


async def test_goaway_is_sent_after_the_handshake(server: TcpRequests) -> None:
    async with connect_raw(server) as peer:
        while not server._server_connections:
            await asyncio.sleep(0)
        await server.withdraw("echo")
        peer.writer.write(pack_hello("requests"))
        assert [(await peer.frame())[0] for _ in range(2)] == [HELLO, protocol.GOAWAY]


@asynccontextmanager
async def hanging(server: TcpRequests, client: TcpRequests) -> AsyncIterator[asyncio.Task[None]]:
    """Yield a call from `client` that `server` answers with one item and no end."""
    started = asyncio.Event()

    async def hang(payload: bytes, writer: ResponseWriter) -> None:
        writer.send(payload)
        await asyncio.Event().wait()

    def sink(_: bytes) -> bool:
        started.set()
        return True

    await server.serve("hang", hang)
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        call = tasks.start(client.call(server.address, "hang", b"", CONTEXT, sink))
        await started.wait()
        yield call
