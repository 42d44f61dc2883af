"""The subscribers' end of one connection: all sources that it follows in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from dynamo.communication.events.broadcast import Broadcast
from dynamo.communication.events.messages import (
    AT,
    DUMP,
    EVENTS,
    FOLLOW,
    GONE,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_place,
    unpack_events,
    unpack_gone,
    unpack_place,
)
from dynamo.communication.events.outlet import CatchUp
from dynamo.communication.events.tracker import Tracker
from dynamo.communication.frames import MAX_FRAME_BYTES, Frame, Splitter
from dynamo.communication.greeting import Greeting
from dynamo.communication.link import Flusher, Link
from dynamo.communication.wires import Wires
from dynamo.core.errors import ProtocolError

MAX_HELD: Final = 1024
"""Batches that wait for an answer; of more, the oldest are dropped and repaired."""


class Reach(msgspec.Struct, frozen=True):
    """How publishers are reached. `lossy`: see `TcpEvents`."""

    wires: Wires
    flusher: Flusher
    broadcast: Broadcast | None
    lossy: Callable[[int], bool] | None


class _Answer:
    """A catch-up as its frames arrive."""

    __slots__ = ("dump", "first", "payloads")

    def __init__(self) -> None:
        self.first: int | None = None
        self.payloads: list[bytes] = []
        self.dump = False


class Following:
    """One connection to one publishing process."""

    def __init__(
        self,
        incarnation: str,
        on_gone: Callable[[int], None],
        reach: Reach,
    ) -> None:
        self.link = Link(self, reach.flusher)
        self.trackers: dict[int, Tracker] = {}
        self.greeting = Greeting(self.link, PLANE, incarnation, reach.wires.secret)
        self._incarnation = incarnation
        self._on_gone = on_gone
        self._reach = reach
        self._answers: dict[int, _Answer] = {}
        self._held: dict[int, list[tuple[int, list[bytes]]]] = {}
        self._tuned: dict[int, Callable[[], None]] = {}

    def follow(self, subject: str, number: int, tracker: Tracker) -> None:
        """Pass on what a source says."""
        self.trackers[number] = tracker
        broadcast = self._reach.broadcast
        if broadcast is not None and number not in self._tuned:
            take = Splitter(MAX_FRAME_BYTES).feed
            self._tuned[number] = broadcast.tune(
                subject, self._incarnation, number, lambda data: self._heard(take(data))
            )
        tracker.start()

    def forget(self, number: int) -> None:
        """No more of it. With the last source the connection closes."""
        self.trackers.pop(number, None)
        self._held.pop(number, None)
        if (leave := self._tuned.pop(number, None)) is not None:
            leave()
        if not self.trackers:
            self.link.close()

    def ask(self, number: int, after: int) -> None:
        """Have a tracker caught up."""
        self._answers[number] = _Answer()
        self.link.write(pack_place(FOLLOW, number, after))

    def on_connect(self) -> None:
        self.greeting.begin()

    def on_frame(self, kind: int, count: int, body: bytes) -> None:
        if not self.greeting.over:
            self.greeting.read(kind, body)
        elif kind == EVENTS:
            number, first, payloads = unpack_events(body, count)
            lossy = self._reach.lossy
            if not (lossy and lossy(first)):
                self._events(number, first, payloads)
        elif kind in {REPLAY, DUMP}:
            self._collect(kind, *unpack_events(body, count))
        elif kind == AT:
            self._complete(*unpack_place(body))
        elif kind == SKIPPED:
            number, last = unpack_place(body)
            if (tracker := self.trackers.get(number)) is not None:
                tracker.skipped(last)
        elif kind == GONE:
            self._on_gone(unpack_gone(body))
        else:
            raise ProtocolError(f"a frame of kind {kind} from a publisher")

    def on_lost(self, error: Exception | None) -> None:
        del error
        self.greeting.lost()
        for leave in self._tuned.values():
            leave()
        self._tuned.clear()

    def _heard(self, frames: Sequence[Frame]) -> None:
        """By broadcast, which may overtake an answer."""
        try:
            for kind, count, body in frames:
                if kind in {EVENTS, SKIPPED, GONE}:
                    self.on_frame(kind, count, body)
        except ProtocolError:
            self.link.abort()

    def _events(self, number: int, first: int, payloads: list[bytes]) -> None:
        """New ones wait while an answer is under way: it may end before them."""
        if number in self._answers:
            held = self._held.setdefault(number, [])
            held.append((first, payloads))
            del held[:-MAX_HELD]
        elif (tracker := self.trackers.get(number)) is not None:
            tracker.events(first, payloads)

    def _collect(self, kind: int, number: int, first: int, payloads: list[bytes]) -> None:
        answer = self._answers.get(number)
        if answer is None:
            return
        answer.dump = kind == DUMP
        if answer.first is None:
            answer.first = first
        answer.payloads += payloads

    def _complete(self, number: int, last: int) -> None:
        tracker = self.trackers.get(number)
        answer = self._answers.pop(number, None)
        if tracker is not None and answer is not None:
            first = last + 1 if answer.first is None else answer.first
            tracker.repair(CatchUp(last, first, answer.payloads, answer.dump))
            for batch in self._held.pop(number, ()):
                self._events(number, *batch)
