"""The publishers' end of one connection: which sources it follows, and what it missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dynamo.communication.events.messages import (
    AT,
    DUMP,
    FOLLOW,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_events,
    pack_gone,
    pack_place,
    unpack_place,
)
from dynamo.communication.events.outlet import Outlet
from dynamo.communication.greeting import Welcome
from dynamo.communication.link import Flusher, Link
from dynamo.core.errors import ProtocolError

MAX_WAITING_BYTES: Final = 4 << 20


class Follower:
    """One subscriber. While 4 MiB wait for it, events are withheld; afterwards it is told where
    the source is, sees its gap, and asks."""

    def __init__(
        self,
        outlets: Mapping[int, Outlet],
        flusher: Flusher,
        incarnation: str,
        on_lost: Callable[[Follower], None],
        secret: str = "",
    ) -> None:
        self.link = Link(self, flusher)
        self.link.on_relief = self._catch_up
        self._outlets = outlets
        self._welcome = Welcome(self.link, PLANE, incarnation, secret)
        self._on_lost = on_lost
        self._follows: set[int] = set()
        self._missed: set[int] = set()

    def send(self, number: int, frames: Sequence[bytes]) -> None:
        """Live events of one source."""
        if number not in self._follows:
            return
        if self.link.congested:
            self._missed.add(number)
            return
        for frame in frames:
            self.link.write(frame)

    def part(self, number: int) -> None:
        """A source was closed."""
        if number in self._follows:
            self._follows.discard(number)
            self._missed.discard(number)
            self.link.write(pack_gone(number))

    def on_connect(self) -> None:
        if self.link.transport is not None:
            self.link.transport.set_write_buffer_limits(high=MAX_WAITING_BYTES)

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        del count
        if not self._welcome.done:
            self._welcome.read(kind, body)
        elif kind == FOLLOW:
            self._follow(*unpack_place(body))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a subscriber")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self._welcome.lost()
        self._on_lost(self)

    def _follow(self, number: int, after: int) -> None:
        outlet = self._outlets.get(number)
        if outlet is None:
            self.link.write(pack_gone(number))
            return
        answer = outlet.catch_up(after)
        self._follows.add(number)
        self._missed.discard(number)
        kind = DUMP if answer.dump else REPLAY
        for frame in pack_events(kind, number, answer.first, answer.payloads):
            self.link.write(frame)
        self.link.write(pack_place(AT, number, answer.last))

    def _catch_up(self) -> None:
        missed, self._missed = self._missed, set()
        for number in missed:
            self.link.write(pack_place(SKIPPED, number, self._outlets[number].last))
