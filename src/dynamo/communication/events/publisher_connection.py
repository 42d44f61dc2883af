"""The publisher's end of a connection to one subscriber."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dynamo.communication.events.protocol import (
    CAUGHT_UP,
    DUMP,
    FOLLOW,
    GONE,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_events,
    pack_position,
    unpack_position,
)
from dynamo.communication.events.source import BufferedEventSource
from dynamo.communication.frames import pack_number
from dynamo.communication.handshake import ServerHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import ProtocolError

MAX_PENDING_BYTES: Final = 4 << 20


class PublisherConnection:
    """Sends the followed sources' events to one subscriber.

    While `MAX_PENDING_BYTES` are unsent, events are withheld. Afterwards SKIPPED frames tell the
    subscriber the last sequences, so that it requests what it missed.
    """

    def __init__(
        self,
        sources: Mapping[int, BufferedEventSource],
        flusher: TurnFlusher,
        transport: PlaneTransport,
        on_lost: Callable[[PublisherConnection], None],
    ) -> None:
        self.link = Link(self, flusher)
        self.link.on_writable = self._send_skipped
        self._sources = sources
        self._handshake = ServerHandshake(self.link, PLANE, transport)
        self._on_lost = on_lost
        self._followed_sources: set[int] = set()
        self._withheld_sources: set[int] = set()

    def send(self, number: int, frames: Sequence[bytes]) -> None:
        """Send new events of a source if the subscriber follows it."""
        if number not in self._followed_sources:
            return
        if self.link.congested:
            self._withheld_sources.add(number)
            return
        for frame in frames:
            self.link.write(frame)

    def on_source_closed(self, number: int) -> None:
        """Tell the subscriber that a source was closed."""
        if number in self._followed_sources:
            self._followed_sources.discard(number)
            self._withheld_sources.discard(number)
            self.link.write(pack_number(GONE, number))

    def on_connect(self) -> None:
        if self.link.transport is not None:
            self.link.transport.set_write_buffer_limits(high=MAX_PENDING_BYTES)

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        del count
        if not self._handshake.done:
            self._handshake.receive(kind, body)
        elif kind == FOLLOW:
            self._start_following(*unpack_position(body))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a subscriber")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self._handshake.on_lost()
        self._on_lost(self)

    def _start_following(self, number: int, after: int) -> None:
        source = self._sources.get(number)
        if source is None:
            self.link.write(pack_number(GONE, number))
            return
        catch_up = source.catch_up(after)
        self._followed_sources.add(number)
        self._withheld_sources.discard(number)
        kind = DUMP if catch_up.dump else REPLAY
        for frame in pack_events(kind, number, catch_up.first, catch_up.payloads):
            self.link.write(frame)
        self.link.write(pack_position(CAUGHT_UP, number, catch_up.last))

    def _send_skipped(self) -> None:
        withheld, self._withheld_sources = self._withheld_sources, set()
        for number in withheld:
            self.link.write(pack_position(SKIPPED, number, self._sources[number].last_sequence))
