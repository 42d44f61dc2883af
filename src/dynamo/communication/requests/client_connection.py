"""The caller's end of a connection to one instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dynamo.communication.frames import pack_number, unpack_items
from dynamo.communication.handshake import ClientHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.requests.client_streams import ClientStreams
from dynamo.communication.requests.protocol import (
    CANCEL,
    DATA,
    GOAWAY,
    PLANE,
    SILENCE_QUERY_BYTES,
    pack_credit,
    pack_open,
    pack_release,
    pack_share,
)
from dynamo.core.context import Context
from dynamo.core.errors import InstanceGone, Overloaded, ProtocolError, WorkerFailed

SILENCE_QUERY_S: Final = 2.0
"""The server is asked about streams that were silent for one to two of these periods."""
LARGE_PAYLOAD_BYTES: Final = 64 << 10
MAX_UNSENT_BYTES: Final = 64 << 20
"""Calls that would leave more than this unsent are refused. The connection stays open."""


class ClientConnection:
    """Carries the calls to one incarnation of a process. Retired, it closes with the last call."""

    def __init__(
        self,
        incarnation: str,
        flusher: TurnFlusher,
        *,
        on_retired: Callable[[ClientConnection], None],
        on_lost: Callable[[ClientConnection], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.streams = ClientStreams(self)
        self.handshake = ClientHandshake(self.link, PLANE, incarnation, secret)
        self._on_retired = on_retired
        self._on_lost = on_lost
        self._retired = False
        self._silence_timer: asyncio.TimerHandle | None = None

    def send_open(
        self,
        stream: int,
        endpoint: str,
        context: Context,
        window_bytes: int,
        payload: bytes,
        shared: int = 0,
    ) -> None:
        frame = pack_open(stream, endpoint, context, window_bytes, payload, shared)
        size = len(payload)
        if size > LARGE_PAYLOAD_BYTES or (size and self.link.congested):
            self._check_unsent(size)
        self.link.write(frame)
        if size > LARGE_PAYLOAD_BYTES:
            self.link.flush()  # the next check counts these bytes
        if self._silence_timer is None:
            self._silence_timer = asyncio.get_running_loop().call_later(
                SILENCE_QUERY_S, self._query_silent_streams
            )

    def send_share(self, number: int, payload: bytes) -> None:
        frame = pack_share(number, payload)
        self._check_unsent(len(payload))
        self.link.write(frame)
        self.link.flush()

    def send_release(self, number: int) -> None:
        self.link.write(pack_release(number))

    def send_cancel(self, stream: int) -> None:
        self.link.write(pack_number(CANCEL, stream))
        if self._retired:
            self._close_when_done()

    def send_credit(self, stream: int, size_bytes: int) -> None:
        self.link.write(pack_credit(stream, size_bytes))

    def retire(self) -> None:
        """Open no more calls on this connection and close it when the last one ends."""
        self._retired = True
        self._on_retired(self)
        self._close_when_done()

    def on_connect(self) -> None:
        self.handshake.send_hello()

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if not self.handshake.done:
            self.handshake.receive(kind, body)
        elif kind == DATA:
            self.streams.deliver(unpack_items(body, count))
            if self._retired:
                self._close_when_done()
        elif kind == GOAWAY:
            self.retire()
        else:
            raise ProtocolError(f"a frame of kind {kind} from a handler")

    def on_lost(self, error: Exception | None) -> None:
        self.handshake.on_lost()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self.streams.fail(
            WorkerFailed(f"the connection to the instance broke: {error or 'closed'}")
        )
        self._on_lost(self)

    def _check_unsent(self, size: int) -> None:
        """Raise `Overloaded` if `size` more bytes exceed the limit. Pings are empty and pass."""
        unsent = self.link.unsent_bytes
        if unsent + size > MAX_UNSENT_BYTES:
            raise Overloaded(
                f"{unsent:,} bytes wait for the connection to the worker; {size:,} more exceed "
                f"{MAX_UNSENT_BYTES:,}",
                retry_after_s=1.0,
            )

    def _query_silent_streams(self) -> None:
        """Ask the server whether silent streams are open, as queued and slow calls are.

        If the end of a call was lost, it is sent again. Silence alone never fails a call.
        """
        self._silence_timer = None
        for stream in self.streams.find_silent_streams():
            self.link.write(pack_credit(stream, SILENCE_QUERY_BYTES))
        if len(self.streams):
            self._silence_timer = asyncio.get_running_loop().call_later(
                SILENCE_QUERY_S, self._query_silent_streams
            )

    def _close_when_done(self) -> None:
        if not len(self.streams):
            self.streams.fail(InstanceGone("the connection to the instance is closed"))
            self.link.close()
