"""The subscriber's end of a connection to one publishing process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from dynamo.communication.events.protocol import (
    CAUGHT_UP,
    DUMP,
    EVENTS,
    FOLLOW,
    GONE,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_position,
    unpack_events,
    unpack_position,
)
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import CatchUp
from dynamo.communication.frames import MAX_FRAME_BYTES, Frame, FrameSplitter, unpack_number
from dynamo.communication.handshake import ClientHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import ProtocolError

MAX_DEFERRED_BATCHES: Final = 1024
"""Batches deferred during a catch-up. Above this, the oldest are dropped and repaired later."""


class Broadcast(Protocol):
    """A carrier that brings one message to all subscribers of a source.

    Sources are named by subject, incarnation of the process, and number. Messages may be lost, but
    those of one source stay in order.
    """

    def send(self, subject: str, number: int, frames: Sequence[bytes], last: int) -> None:
        """Send new events of a source of this process. `last` is their last sequence."""

    def send_end(self, subject: str, number: int, frame: bytes) -> None:
        """Send the GONE frame of a source."""

    def subscribe(
        self, subject: str, incarnation: str, number: int, on_frame: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Call `on_frame` with each frame of a source. Returns a function that unsubscribes."""


class SubscriptionContext(msgspec.Struct, frozen=True):
    """The means by which subscriptions reach publishers. See `TcpEvents` for `lossy`."""

    transport: PlaneTransport
    flusher: TurnFlusher
    broadcast: Broadcast | None
    lossy: Callable[[int], bool] | None


class _PartialCatchUp(msgspec.Struct):
    """A catch-up whose frames are arriving."""

    first: int | None = None
    payloads: list[bytes] = []
    dump: bool = False


class SubscriberConnection:
    """A connection to one publishing process, with the trackers of its followed sources."""

    def __init__(
        self,
        incarnation: str,
        on_source_closed: Callable[[int], None],
        context: SubscriptionContext,
    ) -> None:
        self.link = Link(self, context.flusher)
        self.trackers: dict[int, SequenceTracker] = {}
        self.handshake = ClientHandshake(self.link, PLANE, incarnation, context.transport.secret)
        self._incarnation = incarnation
        self._on_source_closed = on_source_closed
        self._context = context
        self._pending_catch_ups: dict[int, _PartialCatchUp] = {}
        self._deferred_events: dict[int, list[tuple[int, list[bytes]]]] = {}
        self._broadcast_unsubscribes: dict[int, Callable[[], None]] = {}

    def follow(self, subject: str, number: int, tracker: SequenceTracker) -> None:
        """Start passing a source's events to its tracker."""
        self.trackers[number] = tracker
        broadcast = self._context.broadcast
        if broadcast is not None and number not in self._broadcast_unsubscribes:
            split = FrameSplitter(MAX_FRAME_BYTES).feed
            self._broadcast_unsubscribes[number] = broadcast.subscribe(
                subject, self._incarnation, number, lambda data: self._on_broadcast(split(data))
            )
        tracker.start()

    def unfollow(self, number: int) -> None:
        """Stop following a source. The connection closes with the last one."""
        self.trackers.pop(number, None)
        self._deferred_events.pop(number, None)
        if (unsubscribe := self._broadcast_unsubscribes.pop(number, None)) is not None:
            unsubscribe()
        if not self.trackers:
            self.link.close()

    def request_catch_up(self, number: int, after: int) -> None:
        """Request the events of a source after `after` for its tracker."""
        self._pending_catch_ups[number] = _PartialCatchUp()
        self.link.write(pack_position(FOLLOW, number, after))

    def on_connect(self) -> None:
        self.handshake.send_hello()

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if not self.handshake.done:
            self.handshake.receive(kind, body)
        elif kind == EVENTS:
            number, first, payloads = unpack_events(body, count)
            lossy = self._context.lossy
            if not (lossy and lossy(first)):
                self._deliver_events(number, first, payloads)
        elif kind in {REPLAY, DUMP}:
            self._collect_catch_up(kind, *unpack_events(body, count))
        elif kind == CAUGHT_UP:
            self._finish_catch_up(*unpack_position(body))
        elif kind == SKIPPED:
            number, last = unpack_position(body)
            if (tracker := self.trackers.get(number)) is not None:
                tracker.on_skipped(last)
        elif kind == GONE:
            self._on_source_closed(unpack_number(body))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a publisher")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self.handshake.on_lost()
        for unsubscribe in self._broadcast_unsubscribes.values():
            unsubscribe()
        self._broadcast_unsubscribes.clear()

    def _on_broadcast(self, frames: Sequence[Frame]) -> None:
        """Handle frames that came by broadcast, which may overtake a catch-up."""
        try:
            for kind, count, body in frames:
                if kind in {EVENTS, SKIPPED, GONE}:
                    self.on_frame(kind, count, body)
        except ProtocolError:
            self.link.abort()

    def _deliver_events(self, number: int, first: int, payloads: list[bytes]) -> None:
        """Pass new events to the tracker, after the catch-up if one is under way."""
        if number in self._pending_catch_ups:
            deferred = self._deferred_events.setdefault(number, [])
            deferred.append((first, payloads))
            del deferred[:-MAX_DEFERRED_BATCHES]
        elif (tracker := self.trackers.get(number)) is not None:
            tracker.on_events(first, payloads)

    def _collect_catch_up(self, kind: int, number: int, first: int, payloads: list[bytes]) -> None:
        catch_up = self._pending_catch_ups.get(number)
        if catch_up is None:
            return
        catch_up.dump = kind == DUMP
        if catch_up.first is None:
            catch_up.first = first
        catch_up.payloads += payloads

    def _finish_catch_up(self, number: int, last: int) -> None:
        tracker = self.trackers.get(number)
        catch_up = self._pending_catch_ups.pop(number, None)
        if tracker is not None and catch_up is not None:
            first = last + 1 if catch_up.first is None else catch_up.first
            tracker.on_catch_up(CatchUp(last, first, catch_up.payloads, catch_up.dump))
            for batch in self._deferred_events.pop(number, ()):
                self._deliver_events(number, *batch)
