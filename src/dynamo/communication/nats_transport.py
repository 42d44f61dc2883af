"""Connections through NATS: two subjects carry a byte stream in numbered messages.

A missing message ends the connection. So does a peer without subscribers: NATS answers the next
message or ping with "no responders".
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
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import InstanceGone

SUBJECT_ROOT: Final = "dynamo.wire"
SCHEME: Final = "nats://"
BUSY_PING_INTERVAL_S: Final = 0.08
IDLE_PING_INTERVAL_S: Final = 2.0
IDLE_AFTER_S: Final = 3.0
MAX_CONNECTIONS: Final = 4096
_HEADER: Final = Struct("<BI")
_SYN, _DATA, _FIN, _RESET, _PING = range(1, 6)
_SEQUENCE_MASK: Final = (1 << 32) - 1
_RESERVED_BYTES: Final = 512
"""Bytes of the maximum payload that stay free for NATS's own headers."""


class NatsConnection(asyncio.Transport):
    """An end of a connection: the asyncio transport of its link."""

    def __init__(
        self,
        nats: NatsClient,
        link: Link,
        local_subject: str,
        remote_subject: str,
        on_closed: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._nats = nats
        self._link = link
        self._local_subject = local_subject
        self._remote_subject = remote_subject
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._send_sequence = 0
        self._receive_sequence = 0
        self._closed = False
        self._last_activity = time.monotonic()
        self._ping_timer = self._loop.call_later(BUSY_PING_INTERVAL_S, self._ping)

    def connect(self) -> None:
        """Open the connection at the dialling end."""
        self._send(_SYN)
        self._link.connection_made(self)

    def accept(self) -> None:
        """Open the connection at the listening end."""
        self._link.connection_made(self)

    def receive(self, payload: bytes) -> None:
        """Handle one message of the peer."""
        if self._closed or len(payload) < _HEADER.size:
            return
        kind, number = _HEADER.unpack_from(payload)
        if kind == _PING:
            return
        if kind == _RESET:
            self.terminate(ConnectionResetError("the peer reset the connection"))
            return
        if number != self._receive_sequence:
            self._send(_RESET)
            self.terminate(ConnectionResetError("NATS lost messages of this connection"))
            return
        self._receive_sequence = (number + 1) & _SEQUENCE_MASK
        self._last_activity = time.monotonic()
        if kind == _DATA:
            self._link.data_received(payload[_HEADER.size :])
        elif kind == _FIN:
            self.terminate(None)

    def terminate(self, error: Exception | None) -> None:
        """End the connection without telling the peer."""
        if self._closed:
            return
        self._closed = True
        self._ping_timer.cancel()
        self._on_closed(self._local_subject)
        self._loop.call_soon(self._link.connection_lost, error)

    def write(self, data: Any) -> None:
        if self._closed:
            return
        self._last_activity = time.monotonic()
        size = max(1024, self._nats.max_payload_bytes - _RESERVED_BYTES)
        for start in range(0, len(data), size):
            self._send(_DATA, data[start : start + size])

    def close(self) -> None:
        if not self._closed:
            self._send(_FIN)
            self.terminate(None)

    def abort(self) -> None:
        if not self._closed:
            self._send(_RESET)
            self.terminate(None)

    def pause_reading(self) -> None:
        """Do nothing: the other connections through this client keep reading."""

    def resume_reading(self) -> None:
        """Do nothing, like `pause_reading`."""

    def is_closing(self) -> bool:
        return self._closed

    def get_write_buffer_size(self) -> int:
        return self._nats.pending_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: NATS bounds the bytes that wait for a reader."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._remote_subject if name == "peername" else default

    def _send(self, kind: int, body: bytes = b"") -> None:
        number = self._send_sequence
        if kind in {_DATA, _FIN}:
            self._send_sequence = (number + 1) & _SEQUENCE_MASK
        self._nats.publish(
            self._remote_subject, _HEADER.pack(kind, number) + body, self._local_subject
        )

    def _ping(self) -> None:
        """Ping the peer. A ping to a dead process is answered with "no responders" at once."""
        self._send(_PING)
        busy = time.monotonic() - self._last_activity < IDLE_AFTER_S
        self._ping_timer = self._loop.call_later(
            BUSY_PING_INTERVAL_S if busy else IDLE_PING_INTERVAL_S, self._ping
        )


class NatsPlaneTransport(PlaneTransport):
    """Connections to `nats://INCARNATION` through the servers of a `NatsClient`."""

    def __init__(self, nats: NatsClient, options: PlaneOptions = DEFAULT_OPTIONS) -> None:
        super().__init__()
        self._nats = nats
        self.secret = options.secret or options.folder_secret
        self.incarnation = new_incarnation()
        self._connections: dict[str, NatsConnection] = {}
        self._accept: Callable[[], Link] | None = None
        self._unsubscribes: list[Callable[[], None]] = []
        nats.on_connection_change(self._on_connection_change)
        self._unsubscribes.append(
            nats.subscribe(f"{SUBJECT_ROOT}.{self.incarnation}.d.*", self._on_client_message)
        )

    @property
    def address(self) -> str:
        return SCHEME + self.incarnation

    @property
    def is_listening(self) -> bool:
        return self._accept is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        self._accept = accept
        self._unsubscribes.append(
            self._nats.subscribe(f"{SUBJECT_ROOT}.{self.incarnation}.a.*", self._on_server_message)
        )
        await self._nats.flush()

    async def dial(self, link: Link, address: str) -> None:
        incarnation = self.incarnation_of(address)
        await self._nats.first_attempt_done.wait()
        if not self._nats.connected:
            raise ConnectionRefusedError(self._nats.connection_error)
        name = secrets.token_hex(8)
        local_subject = f"{SUBJECT_ROOT}.{self.incarnation}.d.{name}"
        connection = NatsConnection(
            self._nats, link, local_subject, f"{SUBJECT_ROOT}.{incarnation}.a.{name}", self._forget
        )
        self._connections[local_subject] = connection
        connection.connect()

    def incarnation_of(self, address: str) -> str:
        incarnation = address.removeprefix(SCHEME)
        if incarnation == address or not incarnation.isalnum():
            raise InstanceGone(f"{address!r} is no address of an instance")
        return incarnation

    def stop_listening(self) -> None:
        self._accept = None

    def close(self) -> None:
        """Unsubscribe and abort all connections."""
        for unsubscribe in self._unsubscribes:
            unsubscribe()
        for connection in list(self._connections.values()):
            connection.abort()

    def _on_server_message(
        self, subject: str, payload: bytes, reply: str, no_responders: bool
    ) -> None:
        """Handle a message to the listening end. A SYN opens a connection."""
        connection = self._connections.get(subject)
        if connection is not None:
            self._on_client_message(subject, payload, reply, no_responders)
        elif (
            _is_kind(payload, _SYN)
            and self._accept is not None
            and len(self._connections) < MAX_CONNECTIONS
        ):
            connection = NatsConnection(self._nats, self._accept(), subject, reply, self._forget)
            self._connections[subject] = connection
            connection.accept()
        elif reply and not no_responders and not _is_kind(payload, _RESET):
            self._nats.publish(reply, _HEADER.pack(_RESET, 0))

    def _on_client_message(
        self, subject: str, payload: bytes, reply: str, no_responders: bool
    ) -> None:
        del reply
        connection = self._connections.get(subject)
        if connection is None:
            return
        if no_responders:
            connection.terminate(ConnectionResetError("the peer process is gone"))
        elif not _is_kind(payload, _SYN):
            connection.receive(payload)

    def _on_connection_change(self, up: bool) -> None:
        if not up:
            for connection in list(self._connections.values()):
                connection.terminate(ConnectionResetError("the connection to NATS was lost"))

    def _forget(self, subject: str) -> None:
        self._connections.pop(subject, None)


def _is_kind(payload: bytes, kind: int) -> bool:
    return len(payload) >= _HEADER.size and payload[0] == kind
