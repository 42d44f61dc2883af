"""The subscribers' end of one connection: all sources that it follows in one process."""

from __future__ import annotations

from collections.abc import Callable

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
from dynamo.communication.greeting import Greeting
from dynamo.communication.link import Flusher, Link
from dynamo.core.errors import ProtocolError


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
        flusher: Flusher,
        on_gone: Callable[[int], None],
        lossy: Callable[[int], bool] | None,
    ) -> None:
        self.link = Link(self, flusher)
        self.trackers: dict[int, Tracker] = {}
        self.greeting = Greeting(self.link, PLANE, incarnation)
        self._on_gone = on_gone
        self._lossy = lossy
        self._answers: dict[int, _Answer] = {}

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
            tracker = self.trackers.get(number)
            if tracker is not None and not (self._lossy and self._lossy(first)):
                tracker.events(first, payloads)
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
