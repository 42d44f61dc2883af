"""Fuzz target for the frames of the planes: hostile clients and hostile servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from tests.fuzz.campaign import Target
from tests.fuzz.memory_transport import MemoryTransport

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import protocol as events
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.frames import pack_frame, pack_items, pack_number
from dynamo.communication.handshake import PROOF, pack_hello
from dynamo.communication.link import Link
from dynamo.communication.requests import ResponseWriter
from dynamo.communication.requests import protocol as requests
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.communication.transports import PlaneTransport
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError

CONTEXT = Context("request-1", attempt=1, metadata={"a": "b"})
INCARNATION = "there"
ENDPOINT = "worker/generate"


class FuzzPlaneTransport(PlaneTransport):
    """A plane transport in memory. A dialled peer sends `pieces` and disconnects."""

    secret = ""
    incarnation = INCARNATION

    def __init__(self) -> None:
        super().__init__()
        self._accept: Callable[[], Link] | None = None
        self.pieces: Sequence[bytes] = ()

    @property
    def address(self) -> str:
        return "memory"

    @property
    def is_listening(self) -> bool:
        return self._accept is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        self._accept = accept

    async def dial(self, link: Link, address: str) -> None:
        connection = MemoryTransport(link)
        for delay, piece in enumerate(self.pieces):
            asyncio.get_running_loop().call_later(delay * 1e-6, connection.receive, piece)
        asyncio.get_running_loop().call_later(len(self.pieces) * 1e-6 + 1e-4, connection.close)

    def stop_listening(self) -> None:
        self._accept = None

    def incarnation_of(self, address: str) -> str:
        return INCARNATION

    def connect(self) -> MemoryTransport:
        """Return a new connection to the listener."""
        assert self._accept is not None
        return MemoryTransport(self._accept())


async def echo(payload: bytes, writer: ResponseWriter) -> None:
    """Answer with the first 100 bytes of the payload."""
    writer.send(payload[:100])


def client_hello(plane: str) -> bytes:
    """Encode the hello of a client."""
    return pack_hello(plane)


class FramesTarget(Target):
    """Three planes: a request server, a request client and an event publisher."""

    seeds = (
        client_hello("requests") + requests.pack_open(1, ENDPOINT, CONTEXT, 0, b"x" * 50),
        client_hello("requests")
        + requests.pack_open(1, ENDPOINT, CONTEXT, 9, b"x")
        + requests.pack_credit(1, 60)
        + requests.pack_open(2, "nowhere", CONTEXT, 0, b"")
        + pack_number(requests.CANCEL, 2),
        client_hello("events") + events.pack_position(events.FOLLOW, 1, -1),
        client_hello("events")
        + events.pack_position(events.FOLLOW, 1, 0)
        + events.pack_position(events.FOLLOW, 9, 1 << 40),
        client_hello("events") + events.pack_events(events.EVENTS, 1, 5, [b"a", b"bc"])[0],
        pack_hello("requests", INCARNATION) + pack_items(requests.DATA, [1, 1], [b"a", b"b"], [1]),
        pack_hello("requests", INCARNATION)
        + pack_items(requests.DATA, [1, 7], [b"a", b"\x81\xa1x\x01"], [1])
        + pack_frame(requests.GOAWAY),
        pack_hello("requests", nonce=b"n" * 16, proof=b"p" * 32) + pack_frame(PROOF, b"p" * 32),
    )
    words = (
        *(pack_frame(kind) for kind in range(10)),
        *(
            b"\xff\xff\xff\xff",
            b"\x00\x00\x40\x00",
            b"dynamo",
            b"requests",
            b"events",
            b"\xdd\xff\xff",
        ),
        *(pack_frame(requests.OPEN, bytes(8)), pack_frame(requests.DATA, b"\xff" * 16, 65_535)),
        *(msgspec.msgpack.encode(value) for value in ({}, [], None, 2**63, "x" * 300, [[[[]]]])),
    )

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    async def open(self) -> None:
        self._transports = [FuzzPlaneTransport() for _ in range(3)]
        self._directory: Discovery = await open_discovery("memory:fuzz")
        self._server, self._caller = (
            TcpRequests(self._transports[0]),
            TcpRequests(self._transports[1]),
        )
        self._events = TcpEvents(self._transports[2], self._directory)
        await self._server.serve(ENDPOINT, echo)
        self._source = await self._events.open_source("a.b", "me", lambda: [b"state"])
        self._connections: list[MemoryTransport] = []

    async def close(self) -> None:
        await self._caller.close()
        await self._server.close()
        await self._events.close()
        await self._directory.close()

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        await self._connect_and_send(self._transports[0], pieces)
        await self._connect_and_send(self._transports[2], pieces)
        if self._random.random() < 0.2:
            await self._call_hostile_server(pieces)

    async def check(self) -> None:
        answer = await self._connect_and_send(self._transports[0], [self.seeds[0]])
        assert answer.endswith(b"x" * 50), answer
        self._source.publish(b"event")
        answer = await self._connect_and_send(self._transports[2], [self.seeds[2]])
        assert b"state" in answer, answer

    def open_count(self) -> int:
        return sum(not connection.ended for connection in self._connections)

    async def _connect_and_send(
        self, transport: FuzzPlaneTransport, pieces: Sequence[bytes]
    ) -> bytes:
        """Send `pieces` to a listener on a new connection. Returns the answer."""
        self._connections = [connection for connection in self._connections if not connection.ended]
        connection = transport.connect()
        self._connections.append(connection)
        for piece in pieces:
            connection.receive(piece)
        for _ in range(6):
            await asyncio.sleep(0)
        connection.close()
        for _ in range(3):
            await asyncio.sleep(0)
        return bytes(connection.written)

    async def _call_hostile_server(self, pieces: Sequence[bytes]) -> None:
        """Call a server that answers `pieces`. The call must end with an answer or a typed error."""
        self._transports[1].pieces = pieces
        with suppress(DynamoError):
            await self._caller.call("memory", ENDPOINT, b"x", CONTEXT, lambda _: True)
