"""The planes' own frames: strangers at listeners' ports, and listeners that are not what they say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from tests.fuzz.campaign import Target
from tests.fuzz.wire import Wire

from dynamo.communication.discovery import Discovery, open_discovery
from dynamo.communication.events import protocol as events
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.frames import pack_frame, pack_items
from dynamo.communication.handshake import PROOF, pack_hello
from dynamo.communication.link import Link
from dynamo.communication.requests import ResponseWriter
from dynamo.communication.requests import protocol as requests
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.communication.transports import PlaneTransport
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError

HERE = Context("request-1", attempt=1, metadata={"a": "b"})
INCARNATION = "there"
ENDPOINT = "worker/generate"


class LooseWires(PlaneTransport):
    """Nothing but what a test plugs in. `pieces`: what who is dialled says, then it hangs up."""

    secret = ""
    incarnation = INCARNATION

    def __init__(self) -> None:
        self._accept: Callable[[], Link] | None = None
        self.pieces: Sequence[bytes] = ()

    @property
    def address(self) -> str:
        return "loose"

    @property
    def is_listening(self) -> bool:
        return self._accept is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        self._accept = accept

    async def dial(self, link: Link, address: str) -> None:
        wire = Wire(link)
        for delay, piece in enumerate(self.pieces):
            asyncio.get_running_loop().call_later(delay * 1e-6, wire.hear, piece)
        asyncio.get_running_loop().call_later(len(self.pieces) * 1e-6 + 1e-4, wire.close)

    def stop_listening(self) -> None:
        self._accept = None

    def incarnation_of(self, address: str) -> str:
        return INCARNATION

    def plug(self) -> Wire:
        """Somebody dials us."""
        assert self._accept is not None
        return Wire(self._accept())


async def echo(payload: bytes, out: ResponseWriter) -> None:
    """What every call gets."""
    out.send(payload[:100])


def opened(plane: str) -> bytes:
    """The greeting of who dials."""
    return pack_hello(plane)


class FramesTarget(Target):
    """Three ends: who answers calls, who calls, who publishes."""

    seeds = (
        opened("requests") + requests.pack_open(1, ENDPOINT, HERE, 0, b"x" * 50),
        opened("requests")
        + requests.pack_open(1, ENDPOINT, HERE, 9, b"x")
        + requests.pack_credit(1, 60)
        + requests.pack_open(2, "nowhere", HERE, 0, b"")
        + requests.pack_cancel(2),
        opened("events") + events.pack_position(events.FOLLOW, 1, -1),
        opened("events")
        + events.pack_position(events.FOLLOW, 1, 0)
        + events.pack_position(events.FOLLOW, 9, 1 << 40),
        opened("events") + events.pack_events(events.EVENTS, 1, 5, [b"a", b"bc"])[0],
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
        *(msgspec.msgpack.encode(one) for one in ({}, [], None, 2**63, "x" * 300, [[[[]]]])),
    )

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)

    async def open(self) -> None:
        self._wires = [LooseWires() for _ in range(3)]
        self._directory: Discovery = await open_discovery("memory:fuzz")
        self._served, self._caller = TcpRequests(self._wires[0]), TcpRequests(self._wires[1])
        self._events = TcpEvents(self._wires[2], self._directory)
        await self._served.serve(ENDPOINT, echo)
        self._source = await self._events.open_source("a.b", "me", lambda: [b"state"])
        self._plugged: list[Wire] = []

    async def close(self) -> None:
        await self._caller.close()
        await self._served.close()
        await self._events.close()
        await self._directory.close()

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        await self._stranger(self._wires[0], pieces)
        await self._stranger(self._wires[2], pieces)
        if self._chance.random() < 0.2:
            await self._hostile(pieces)

    async def check(self) -> None:
        said = await self._stranger(self._wires[0], [self.seeds[0]])
        assert said.endswith(b"x" * 50), said
        self._source.publish(b"event")
        said = await self._stranger(self._wires[2], [self.seeds[2]])
        assert b"state" in said, said

    def held(self) -> int:
        return sum(not wire.ended for wire in self._plugged)

    async def _stranger(self, wires: LooseWires, pieces: Sequence[bytes]) -> bytes:
        """At a listener's port; what it is told."""
        wire = wires.plug()
        self._plugged = [one for one in self._plugged if not one.ended]
        self._plugged.append(wire)
        for piece in pieces:
            wire.hear(piece)
        for _ in range(6):
            await asyncio.sleep(0)
        wire.close()
        for _ in range(3):
            await asyncio.sleep(0)
        return bytes(wire.said)

    async def _hostile(self, pieces: Sequence[bytes]) -> None:
        """What a caller makes of such a listener: an answer or a typed error."""
        self._wires[1].pieces = pieces
        with suppress(DynamoError):
            await self._caller.call("loose", ENDPOINT, b"x", HERE, lambda _: True)
