"""Events inside one process: `memory:` is one place for all, `memory:NAME` a place apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.outlet import Outlet, new_epoch
from dynamo.communication.events.plane import Dump, Events, Listener, Source
from dynamo.communication.events.tracker import Tracker
from dynamo.communication.link import Flusher
from dynamo.communication.options import DEFAULT, PlaneOptions

_places: dict[str, _Place] = {}


class _Place:
    """All sources and subscriptions of one name."""

    def __init__(self) -> None:
        self.planes: set[MemoryEvents] = set()
        self.sources: dict[tuple[str, str], _MemorySource] = {}
        self.subscriptions: set[_Subscription] = set()


class MemoryEvents(Events):
    """Every object is a process of its own to the others.

    `lossy(first sequence)` True: a batch is dropped on its way in (for tests of repair).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._place = _places.setdefault(name, _Place())
        self._place.planes.add(self)
        self._flusher = Flusher()
        self._sources: set[_MemorySource] = set()
        self._subscriptions: set[_Subscription] = set()
        self._lost = 0
        self.lossy: Callable[[int], bool] | None = None
        self.severed = False

    @classmethod
    async def open(cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT) -> Self:
        """Join the place that the URL names; the directory is not needed."""
        del directory, options
        return cls(url.partition(":")[2])

    async def source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> Source:
        made = _MemorySource(self, subject, publisher, self._place, self._sources.discard)
        outlet = Outlet(dump, self._flusher.arm, made.send, made.close, latest=latest)
        made.outlet = outlet
        self._sources.add(made)
        made.appear()
        return outlet

    async def subscribe(self, prefix: str, listener: Listener) -> Callable[[], None]:
        subscription = _Subscription(self, prefix, listener)
        self._subscriptions.add(subscription)
        self._place.subscriptions.add(subscription)
        for source in self._place.sources.values():
            subscription.meet(source)
        return partial(self._unsubscribe, subscription)

    def lost(self) -> int:
        return self._lost + sum(one.lost() for one in self._subscriptions)

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            self._unsubscribe(subscription)
        for source in tuple(self._sources):
            await source.outlet.close()
        self._place.planes.discard(self)
        if not self._place.planes:
            _places.pop(self._name, None)

    def sever(self) -> None:
        """The network reaches this process no more: events from it and for it are lost."""
        self.severed = True

    def rejoin(self) -> None:
        """The network reaches it again: connections are made anew."""
        self.severed = False
        for subscription in self._place.subscriptions:
            for source in self._place.sources.values():
                if self in (subscription.plane, source.plane):
                    subscription.reconnect(source)

    def _unsubscribe(self, subscription: _Subscription) -> None:
        self._lost += subscription.lost()
        self._subscriptions.discard(subscription)
        self._place.subscriptions.discard(subscription)
        subscription.trackers.clear()


class _MemorySource:
    outlet: Outlet

    def __init__(
        self,
        plane: MemoryEvents,
        subject: str,
        publisher: str,
        place: _Place,
        on_close: Callable[[_MemorySource], None],
    ) -> None:
        self.plane = plane
        self._place = place
        self._on_close = on_close
        self.subject = subject
        self.publisher = publisher
        self.epoch = new_epoch()

    def appear(self) -> None:
        self._place.sources[self.subject, self.publisher] = self
        for subscription in list(self._place.subscriptions):
            subscription.meet(self)

    def disappear(self) -> None:
        key = self.subject, self.publisher
        if self._place.sources.get(key) is self:
            del self._place.sources[key]
        for subscription in list(self._place.subscriptions):
            subscription.part(self)

    async def close(self) -> None:
        """The outlet's last word."""
        self.disappear()
        self._on_close(self)

    def send(self, first: int, payloads: Sequence[bytes]) -> None:
        for subscription in list(self._place.subscriptions):
            subscription.take(self, first, payloads)


class _Subscription:
    def __init__(self, plane: MemoryEvents, prefix: str, listener: Listener) -> None:
        self.plane = plane
        self._prefix = prefix
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.trackers: dict[tuple[str, str], Tracker] = {}

    def lost(self) -> int:
        return sum(tracker.lost for tracker in self.trackers.values())

    def meet(self, source: _MemorySource) -> None:
        """A source appeared: follow it, in place of the same publisher's former epoch."""
        if not source.subject.startswith(self._prefix):
            return
        key = source.subject, source.publisher
        tracker = Tracker(
            *key,
            source.epoch,
            self._listener,
            lambda after: self._ask(tracker, source, after),
            self.trackers.get(key),
        )
        self.trackers[key] = tracker
        tracker.start()

    def part(self, source: _MemorySource) -> None:
        """A source disappeared."""
        tracker = self._tracker(source)
        if tracker is not None:
            del self.trackers[source.subject, source.publisher]
            tracker.gone()

    def take(self, source: _MemorySource, first: int, payloads: Sequence[bytes]) -> None:
        """Live events."""
        tracker = self._tracker(source)
        if tracker is None or self._severed(source):
            return
        if not (self.plane.lossy and self.plane.lossy(first)):
            tracker.events(first, payloads)

    def reconnect(self, source: _MemorySource) -> None:
        """What happened while nothing came through is asked for."""
        tracker = self._tracker(source)
        if tracker is not None and not self._severed(source):
            tracker.interrupted()
            tracker.start()

    def _severed(self, source: _MemorySource) -> bool:
        return self.plane.severed or source.plane.severed

    def _tracker(self, source: _MemorySource) -> Tracker | None:
        tracker = self.trackers.get((source.subject, source.publisher))
        return tracker if tracker is not None and tracker.epoch == source.epoch else None

    def _ask(self, tracker: Tracker, source: _MemorySource, after: int) -> None:
        self._loop.call_soon(self._answer, tracker, source, after)

    def _answer(self, tracker: Tracker, source: _MemorySource, after: int) -> None:
        if self._tracker(source) is tracker and not self._severed(source):
            tracker.repair(source.outlet.catch_up(after))
