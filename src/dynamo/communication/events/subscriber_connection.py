"""The subscribers' end of one connection: all sources that it follows in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from dynamo.communication.events.broadcast import Broadcast
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
    unpack_gone,
    unpack_position,
)
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import CatchUp
from dynamo.communication.frames import MAX_FRAME_BYTES, Frame, FrameSplitter
from dynamo.communication.handshake import ClientHandshake
from dynamo.communication.link import Link, TurnFlusher
from dynamo.communication.transports import PlaneTransport
from dynamo.core.errors import ProtocolError

MAX_DEFERRED_BATCHES: Final = 1024
"""Batches that wait for an answer; of more, the oldest are dropped and repaired."""


class SubscriptionContext(msgspec.Struct, frozen=True):
    """How publishers are reached. `lossy`: see `TcpEvents`."""

    transport: PlaneTransport
    flusher: TurnFlusher
    broadcast: Broadcast | None
    lossy: Callable[[int], bool] | None


class _PartialCatchUp:
    """A catch-up as its frames arrive."""

    __slots__ = ("dump", "first", "payloads")

    def __init__(self) -> None:
        self.first: int | None = None
        self.payloads: list[bytes] = []
        self.dump = False


class SubscriberConnection:
    """One connection to one publishing process."""

    def __init__(
        self,
        incarnation: str,
        on_gone: Callable[[int], None],
        reach: SubscriptionContext,
    ) -> None:
        self.link = Link(self, reach.flusher)
        self.trackers: dict[int, SequenceTracker] = {}
        self.handshake = ClientHandshake(self.link, PLANE, incarnation, reach.transport.secret)
        self._incarnation = incarnation
        self._on_source_closed = on_gone
        self._context = reach
        self._pending_catch_ups: dict[int, _PartialCatchUp] = {}
        self._deferred_events: dict[int, list[tuple[int, list[bytes]]]] = {}
        self._broadcast_unsubscribes: dict[int, Callable[[], None]] = {}

    def follow(self, subject: str, number: int, tracker: SequenceTracker) -> None:
        """Pass on what a source says."""
        self.trackers[number] = tracker
        broadcast = self._context.broadcast
        if broadcast is not None and number not in self._broadcast_unsubscribes:
            take = FrameSplitter(MAX_FRAME_BYTES).feed
            self._broadcast_unsubscribes[number] = broadcast.subscribe(
                subject, self._incarnation, number, lambda data: self._on_broadcast(take(data))
            )
        tracker.start()

    def unfollow(self, number: int) -> None:
        """No more of it. With the last source the connection closes."""
        self.trackers.pop(number, None)
        self._deferred_events.pop(number, None)
        if (leave := self._broadcast_unsubscribes.pop(number, None)) is not None:
            leave()
        if not self.trackers:
            self.link.close()

    def request_catch_up(self, number: int, after: int) -> None:
        """Have a tracker caught up."""
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
            self._on_source_closed(unpack_gone(body))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a publisher")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self.handshake.on_lost()
        for leave in self._broadcast_unsubscribes.values():
            leave()
        self._broadcast_unsubscribes.clear()

    def _on_broadcast(self, frames: Sequence[Frame]) -> None:
        """By broadcast, which may overtake an answer."""
        try:
            for kind, count, body in frames:
                if kind in {EVENTS, SKIPPED, GONE}:
                    self.on_frame(kind, count, body)
        except ProtocolError:
            self.link.abort()

    def _deliver_events(self, number: int, first: int, payloads: list[bytes]) -> None:
        """New ones wait while an answer is under way: it may end before them."""
        if number in self._pending_catch_ups:
            held = self._deferred_events.setdefault(number, [])
            held.append((first, payloads))
            del held[:-MAX_DEFERRED_BATCHES]
        elif (tracker := self.trackers.get(number)) is not None:
            tracker.on_events(first, payloads)

    def _collect_catch_up(self, kind: int, number: int, first: int, payloads: list[bytes]) -> None:
        answer = self._pending_catch_ups.get(number)
        if answer is None:
            return
        answer.dump = kind == DUMP
        if answer.first is None:
            answer.first = first
        answer.payloads += payloads

    def _finish_catch_up(self, number: int, last: int) -> None:
        tracker = self.trackers.get(number)
        answer = self._pending_catch_ups.pop(number, None)
        if tracker is not None and answer is not None:
            first = last + 1 if answer.first is None else answer.first
            tracker.on_catch_up(CatchUp(last, first, answer.payloads, answer.dump))
            for batch in self._deferred_events.pop(number, ()):
                self._deliver_events(number, *batch)
