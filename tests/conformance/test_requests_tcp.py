"""What only the wire can show: frames, handshakes, hostile peers."""

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
from dynamo.core.errors import ConfigError, InstanceGone, WorkerFailed
from dynamo.core.tasks import BackgroundTasks, run_all

HERE = Context("r")


async def echo(payload: bytes, out: ResponseWriter) -> None:
    out.send(payload)


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


class Raw:
    """A peer that sends what it likes."""

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
async def raw(plane: TcpRequests, *first: bytes) -> AsyncIterator[Raw]:
    there = parse_address(plane.address)
    reader, writer = await asyncio.open_connection(there.host, there.port)
    writer.write(b"".join(first))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def works(client: TcpRequests, server: TcpRequests) -> bool:
    got: list[bytes] = []
    await client.call(
        server.address, "echo", b"x", HERE, lambda payload: got.append(payload) is None
    )
    return got == [b"x"]


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
    pack_hello("requests") + 2 * protocol.pack_open(7, "echo", HERE, 0, b""),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_who_breaks_the_protocol_is_cut_off_alone(
    server: TcpRequests, client: TcpRequests, garbage: bytes
) -> None:
    assert await works(client, server)
    async with raw(server, garbage) as peer:
        assert await peer.closed()
    assert await works(client, server)


async def test_all_streams_of_a_turn_share_a_frame(server: TcpRequests) -> None:
    begun: list[ResponseWriter] = []
    ready, over = asyncio.Event(), asyncio.Event()

    async def hold(payload: bytes, out: ResponseWriter) -> None:
        begun.append(out)
        if len(begun) == 20:
            ready.set()
        await over.wait()

    await server.serve("hold", hold)
    openings = [protocol.pack_open(number, "hold", HERE, 0, b"") for number in range(1, 21)]
    async with raw(server, pack_hello("requests"), *openings) as peer:
        assert (await peer.frame())[0] == HELLO
        await ready.wait()
        for out in begun:
            out.send(b"token")
        kind, count, body = await peer.frame()
        assert (kind, count) == (protocol.DATA, 20)
        assert list(unpack_items(body, count)) == [(n, 0, b"token") for n in range(1, 21)]
        over.set()
        kind, count, body = await peer.frame()
        assert {(flags, payload) for _, flags, payload in unpack_items(body, count)} == {
            (END_STREAM, b"")
        }


async def test_a_hello_of_the_next_version_is_understood(server: TcpRequests) -> None:
    newer = {"magic": MAGIC, "plane": "requests", "version": VERSION + 1, "oldest": VERSION, "x": 1}
    async with raw(server, pack_frame(HELLO, msgspec.msgpack.encode(newer))) as peer:
        assert (await peer.frame())[0] == HELLO
        peer.writer.write(protocol.pack_open(1, "echo", HERE, 0, b"x"))
        assert (await peer.frame())[0] == protocol.DATA


async def test_a_hello_of_another_age_is_told_and_refused(server: TcpRequests) -> None:
    strange = {"magic": MAGIC, "plane": "requests", "version": 99, "oldest": 98}
    async with raw(server, pack_frame(HELLO, msgspec.msgpack.encode(strange))) as peer:
        assert (await peer.frame())[0] == HELLO
        assert await peer.closed()


async def test_callers_at_the_same_time_share_one_connection(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await run_all(*(works(client, server) for _ in range(50))) == [True] * 50
    assert len(server._server_connections) == 1


async def test_a_cancelled_opener_leaves_the_dial_to_the_others(
    server: TcpRequests, client: TcpRequests
) -> None:
    first = client._tasks.start(works(client, server))
    second = client._tasks.start(works(client, server))
    await asyncio.sleep(0)
    first.cancel()
    assert await second


async def test_another_incarnation_is_gone(server: TcpRequests, client: TcpRequests) -> None:
    there = server.address.rsplit("/", 1)[0]
    with pytest.raises(InstanceGone):
        await client.call(f"{there}/0123456789abcdef", "echo", b"", HERE, lambda _: True)
    assert await works(client, server)


async def test_one_that_accepts_and_is_silent_is_gone(
    client: TcpRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    held: list[asyncio.StreamWriter] = []
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(InstanceGone):
        await client.call(f"tcp://127.0.0.1:{port}/abc", "echo", b"", HERE, lambda _: True)
    silent.close()
    for writer in held:
        writer.close()


async def test_a_connection_without_stream_ids_left_is_replaced(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await works(client, server)
    (peer,) = client._client_connections.values()
    peer.streams._last_stream_id = protocol.MAX_STREAM_ID - 1
    assert await works(client, server)
    assert await works(client, server)
    assert peer not in client._client_connections.values()
    await peer.link.closed.wait()


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:1", "tcp://[::]:0", "tcp://x:y"]
)
async def test_listening_wider_needs_a_secret(url: str) -> None:
    with pytest.raises(ConfigError):
        await open_requests(url)


async def test_an_unknown_scheme_names_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown") as caught:
        await open_requests("tpc://127.0.0.1:0")
    assert "tcp" in caught.value.hint


async def test_a_peer_that_reads_nothing_does_not_hold_up_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "CLOSE_TIMEOUT_S", 0.05)
    server = await TcpRequests.open("tcp:")
    sent = asyncio.Event()

    async def pour(payload: bytes, out: ResponseWriter) -> None:
        out.send(bytes(32 << 20))
        sent.set()
        await asyncio.Event().wait()

    await server.serve("pour", pour)
    opening = protocol.pack_open(1, "pour", HERE, 0, b"")
    async with raw(server, pack_hello("requests"), opening) as peer:
        peer.writer.transport.pause_reading()
        await sent.wait()
        await server.close()


@asynccontextmanager
async def accepting(*says: bytes) -> AsyncIterator[tuple[str, asyncio.Queue[asyncio.StreamReader]]]:
    """An address where every connection is accepted and told `says`; who connected."""
    connected: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"".join(says))
        connected.put_nowait(reader)

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    yield f"tcp://127.0.0.1:{port}/abc", connected
    listening.close()
    for writer in writers:
        writer.close()


async def test_a_peer_that_never_greets_is_told_to_give_no_answer(
    client: TcpRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.01)
    async with accepting() as (address, _):
        with pytest.raises(InstanceGone, match="cannot be reached: no answer"):
            await client.call(address, "echo", b"", HERE, lambda _: True)


async def test_closing_while_dialling_leaves_no_connection(client: TcpRequests) -> None:
    async with accepting() as (address, connected), BackgroundTasks() as tasks:
        call = tasks.start(client.call(address, "echo", b"", HERE, lambda _: True))
        reader = await connected.get()
        await client.close()
        with pytest.raises(InstanceGone):
            await call
        with suppress(ConnectionError):
            await reader.read()  # the hello, then the end


async def test_a_retired_connection_closes_with_its_last_call_however_that_ends(
    server: TcpRequests, client: TcpRequests
) -> None:
    async with hanging(server, client) as call:
        (peer,) = client._client_connections.values()
        await server.withdraw("echo")
        withdrawn = server._tasks.start(server.withdraw("hang", None))
        while client._client_connections:
            await asyncio.sleep(0)
        call.cancel()
        await peer.link.closed.wait()
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


async def test_a_call_on_a_connection_that_is_being_closed_did_nothing(
    server: TcpRequests, client: TcpRequests
) -> None:
    assert await works(client, server)
    (peer,) = client._client_connections.values()
    peer.retire()
    with pytest.raises(InstanceGone):
        await peer.streams.call("echo", b"", HERE, lambda _: True, None)


async def test_who_has_not_said_hello_is_not_told_to_go(server: TcpRequests) -> None:
    async with raw(server) as peer:
        while not server._server_connections:
            await asyncio.sleep(0)
        await server.withdraw("echo")
        peer.writer.write(pack_hello("requests"))
        assert [(await peer.frame())[0] for _ in range(2)] == [HELLO, protocol.GOAWAY]


@asynccontextmanager
async def hanging(server: TcpRequests, client: TcpRequests) -> AsyncIterator[asyncio.Task[None]]:
    """A call from `client` that `server` answers with one item and no end."""
    begun = asyncio.Event()

    async def hang(payload: bytes, out: ResponseWriter) -> None:
        out.send(payload)
        await asyncio.Event().wait()

    def sink(_: bytes) -> bool:
        begun.set()
        return True

    await server.serve("hang", hang)
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        call = tasks.start(client.call(server.address, "hang", b"", HERE, sink))
        await begun.wait()
        yield call
