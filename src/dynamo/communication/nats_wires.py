"""Connections through NATS: each is a pair of subjects that carry a byte stream in numbered pieces.

A piece that is missing ends the connection; so does a peer whose subjects nobody listens to any
more, which NATS tells with the next piece or ping.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.link import Link
from dynamo.communication.nats_link import NatsLink
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.wires import Wires
from dynamo.core.errors import InstanceGone

ROOT: Final = "dynamo.wire"
SCHEME: Final = "nats://"
BUSY_PING_S: Final = 0.08
IDLE_PING_S: Final = 2.0
BUSY_FOR_S: Final = 3.0
MAX_ACCEPTED: Final = 4096
_HEAD: Final = Struct("<BI")
_SYN, _DATA, _FIN, _RESET, _PING = range(1, 6)
_NUMBERS: Final = (1 << 32) - 1
_ROOM: Final = 512
"""Kept free in a message for the protocol around it."""


class NatsTransport(asyncio.Transport):
    """One end of one connection. `mine`, `theirs`: the subjects."""

    def __init__(
        self, nats: NatsLink, link: Link, mine: str, theirs: str, gone: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._nats = nats
        self._link = link
        self._mine = mine
        self._theirs = theirs
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._received = 0
        self._closed = False
        self._touched = time.monotonic()
        self._pinging = self._loop.call_later(BUSY_PING_S, self._ping)

    def begin(self) -> None:
        """At the end of who dials."""
        self._say(_SYN)
        self._link.connection_made(self)

    def accept(self) -> None:
        """At the end of who listens."""
        self._link.connection_made(self)

    def take(self, payload: bytes) -> None:
        """One message of the peer."""
        if self._closed or len(payload) < _HEAD.size:
            return
        kind, number = _HEAD.unpack_from(payload)
        if kind == _PING:
            return
        if kind == _RESET:
            self.lose(ConnectionResetError("reset by the peer"))
            return
        if number != self._received:
            self._say(_RESET)
            self.lose(ConnectionResetError("NATS lost messages of this connection"))
            return
        self._received = (number + 1) & _NUMBERS
        self._touched = time.monotonic()
        if kind == _DATA:
            self._link.data_received(payload[_HEAD.size :])
        elif kind == _FIN:
            self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """The connection is over."""
        if self._closed:
            return
        self._closed = True
        self._pinging.cancel()
        self._gone(self._mine)
        self._loop.call_soon(self._link.connection_lost, error)

    def write(self, data: Any) -> None:
        if self._closed:
            return
        self._touched = time.monotonic()
        size = max(1024, self._nats.max_payload_bytes - _ROOM)
        for start in range(0, len(data), size):
            self._say(_DATA, data[start : start + size])

    def close(self) -> None:
        if not self._closed:
            self._say(_FIN)
            self.lose(None)

    def abort(self) -> None:
        if not self._closed:
            self._say(_RESET)
            self.lose(None)

    def is_closing(self) -> bool:
        return self._closed

    def get_write_buffer_size(self) -> int:
        return self._nats.waiting_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """NATS bounds what waits for a reader."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._theirs if name == "peername" else default

    def pause_reading(self) -> None:
        """Not possible through NATS."""

    def resume_reading(self) -> None:
        """Not possible through NATS."""

    def _say(self, kind: int, body: bytes = b"") -> None:
        number = self._sent
        if kind in {_DATA, _FIN}:
            self._sent = (number + 1) & _NUMBERS
        self._nats.publish(self._theirs, _HEAD.pack(kind, number) + body, self._mine)

    def _ping(self) -> None:
        """A message to a dead process comes back at once as "nobody listens"."""
        self._say(_PING)
        busy = time.monotonic() - self._touched < BUSY_FOR_S
        self._pinging = self._loop.call_later(BUSY_PING_S if busy else IDLE_PING_S, self._ping)


class NatsWires(Wires):
    """`nats://INCARNATION`; the servers are the link's."""

    def __init__(self, nats: NatsLink, options: PlaneOptions = DEFAULT) -> None:
        self._nats = nats
        self.secret = options.secret
        self.incarnation = new_incarnation()
        self._open: dict[str, NatsTransport] = {}
        self._accept: Callable[[], Link] | None = None
        self._leave: list[Callable[[], None]] = []
        nats.on_state(self._changed)
        self._leave.append(nats.listen(f"{ROOT}.{self.incarnation}.d.*", self._heard))

    @property
    def address(self) -> str:
        return SCHEME + self.incarnation

    @property
    def listening(self) -> bool:
        return self._accept is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        self._accept = accept
        self._leave.append(self._nats.listen(f"{ROOT}.{self.incarnation}.a.*", self._called))
        await self._nats.settled()

    async def dial(self, link: Link, address: str) -> None:
        incarnation = self.incarnation_of(address)
        await self._nats.tried.wait()
        if not self._nats.up:
            raise ConnectionRefusedError(self._nats.trouble)
        name = secrets.token_hex(8)
        mine = f"{ROOT}.{self.incarnation}.d.{name}"
        made = NatsTransport(self._nats, link, mine, f"{ROOT}.{incarnation}.a.{name}", self._forget)
        self._open[mine] = made
        made.begin()

    def incarnation_of(self, address: str) -> str:
        incarnation = address.removeprefix(SCHEME)
        if incarnation == address or not incarnation.isalnum():
            raise InstanceGone(f"{address!r} is no address of an instance")
        return incarnation

    def stop(self) -> None:
        self._accept = None

    def leave(self) -> None:
        """Hear nothing any more."""
        for leave in self._leave:
            leave()
        for one in list(self._open.values()):
            one.abort()

    def _called(self, subject: str, payload: bytes, reply: str, nobody: bool) -> None:
        """A message for the listening end: the first one of a connection opens it."""
        known = self._open.get(subject)
        if known is not None:
            self._heard(subject, payload, reply, nobody)
        elif _is(payload, _SYN) and self._accept is not None and len(self._open) < MAX_ACCEPTED:
            made = NatsTransport(self._nats, self._accept(), subject, reply, self._forget)
            self._open[subject] = made
            made.accept()
        elif reply and not nobody and not _is(payload, _RESET):
            self._nats.publish(reply, _HEAD.pack(_RESET, 0))

    def _heard(self, subject: str, payload: bytes, reply: str, nobody: bool) -> None:
        del reply
        known = self._open.get(subject)
        if known is None:
            return
        if nobody:
            known.lose(ConnectionResetError("the process has gone"))
        elif not _is(payload, _SYN):
            known.take(payload)

    def _changed(self, up: bool) -> None:
        if not up:
            for one in list(self._open.values()):
                one.lose(ConnectionResetError("NATS is away"))

    def _forget(self, subject: str) -> None:
        self._open.pop(subject, None)


def _is(payload: bytes, kind: int) -> bool:
    return len(payload) >= _HEAD.size and payload[0] == kind
