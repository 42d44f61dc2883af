"""The publishers' end of one connection: which sources it follows, and what it missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dynamo.communication.events.protocol import (
    CAUGHT_UP,
    DUMP,
    FOLLOW,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_events,
    pack_gone,
    pack_position,
    unpack_position,
)
from dynamo.communication.events.source import BufferedEventSource
from dynamo.communication.handshake import ServerHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.core.errors import ProtocolError

MAX_PENDING_BYTES: Final = 4 << 20


class PublisherConnection:
    """One subscriber. While 4 MiB wait for it, events are withheld; afterwards it is told where
    the source is, sees its gap, and asks."""

    def __init__(
        self,
        outlets: Mapping[int, BufferedEventSource],
        flusher: TurnFlusher,
        incarnation: str,
        on_lost: Callable[[PublisherConnection], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.link.on_writable = self._send_skipped
        self._sources = outlets
        self._handshake = ServerHandshake(self.link, PLANE, incarnation, secret)
        self._on_lost = on_lost
        self._followed_sources: set[int] = set()
        self._withheld_sources: set[int] = set()

    def send(self, number: int, frames: Sequence[bytes]) -> None:
        """Live events of one source."""
        if number not in self._followed_sources:
            return
        if self.link.congested:
            self._withheld_sources.add(number)
            return
        for frame in frames:
            self.link.write(frame)

    def on_source_closed(self, number: int) -> None:
        """A source was closed."""
        if number in self._followed_sources:
            self._followed_sources.discard(number)
            self._withheld_sources.discard(number)
            self.link.write(pack_gone(number))

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
        outlet = self._sources.get(number)
        if outlet is None:
            self.link.write(pack_gone(number))
            return
        answer = outlet.catch_up(after)
        self._followed_sources.add(number)
        self._withheld_sources.discard(number)
        kind = DUMP if answer.dump else REPLAY
        for frame in pack_events(kind, number, answer.first, answer.payloads):
            self.link.write(frame)
        self.link.write(pack_position(CAUGHT_UP, number, answer.last))

    def _send_skipped(self) -> None:
        missed, self._withheld_sources = self._withheld_sources, set()
        for number in missed:
            self.link.write(pack_position(SKIPPED, number, self._sources[number].last_sequence))
