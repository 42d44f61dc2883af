"""Events within one process: `memory:NAME`. Planes with the same name share one bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.plane import Dump, EventListener, Events, EventSource
from dynamo.communication.events.sequence_tracker import SequenceTracker
from dynamo.communication.events.source import BufferedEventSource, new_epoch
from dynamo.communication.link import TurnFlusher
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions

_buses: dict[str, _EventBus] = {}


class _EventBus:
    """The sources and subscriptions of one name."""

    def __init__(self) -> None:
        self.planes: set[MemoryEvents] = set()
        self.sources: dict[tuple[str, str], _MemorySource] = {}
        self.subscriptions: set[_MemorySubscription] = set()


class MemoryEvents(Events):
    """An event plane in memory. Each object stands for one process.

    Tests of repair set `lossy`: received batches whose first sequence it maps to True are dropped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bus = _buses.setdefault(name, _EventBus())
        self._bus.planes.add(self)
        self._flusher = TurnFlusher()
        self._sources: set[_MemorySource] = set()
        self._subscriptions: set[_MemorySubscription] = set()
        self._lost_events = 0
        self.lossy: Callable[[int], bool] | None = None
        self.severed = False

    @classmethod
    async def open(
        cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
    ) -> Self:
        """Join the bus that the URL names. The directory is not used."""
        del directory, options
        return cls(url.partition(":")[2])

    async def open_source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> EventSource:
        source = _MemorySource(self, subject, publisher, self._bus, self._sources.discard)
        buffer = BufferedEventSource(
            dump, self._flusher.schedule, source.send, source.close, latest=latest
        )
        source.buffer = buffer
        self._sources.add(source)
        source.register()
        return buffer

    async def subscribe(self, prefix: str, listener: EventListener) -> Callable[[], None]:
        subscription = _MemorySubscription(self, prefix, listener)
        self._subscriptions.add(subscription)
        self._bus.subscriptions.add(subscription)
        for source in self._bus.sources.values():
            subscription.add_source(source)
        return partial(self._unsubscribe, subscription)

    def count_lost_events(self) -> int:
        return self._lost_events + sum(
            subscription.count_lost_events() for subscription in self._subscriptions
        )

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            self._unsubscribe(subscription)
        for source in tuple(self._sources):
            await source.buffer.close()
        self._bus.planes.discard(self)
        if not self._bus.planes:
            _buses.pop(self._name, None)

    def sever(self) -> None:
        """Lose all events from and to this process, like a broken network. For tests."""
        self.severed = True

    def rejoin(self) -> None:
        """End `sever`: subscriptions catch up with their sources."""
        self.severed = False
        for subscription in self._bus.subscriptions:
            for source in self._bus.sources.values():
                if self in (subscription.plane, source.plane):
                    subscription.reconnect(source)

    def _unsubscribe(self, subscription: _MemorySubscription) -> None:
        self._lost_events += subscription.count_lost_events()
        self._subscriptions.discard(subscription)
        self._bus.subscriptions.discard(subscription)
        subscription.trackers.clear()


@dataclass(eq=False)
class _MemorySource:
    plane: MemoryEvents
    subject: str
    publisher: str
    bus: _EventBus
    on_close: Callable[[_MemorySource], None]
    epoch: int = field(default_factory=new_epoch)
    buffer: BufferedEventSource = field(init=False)

    def register(self) -> None:
        self.bus.sources[self.subject, self.publisher] = self
        for subscription in list(self.bus.subscriptions):
            subscription.add_source(self)

    async def close(self) -> None:
        """Remove the source after the buffer has sent its last events."""
        key = self.subject, self.publisher
        if self.bus.sources.get(key) is self:
            del self.bus.sources[key]
        for subscription in list(self.bus.subscriptions):
            subscription.remove_source(self)
        self.on_close(self)

    def send(self, first: int, payloads: Sequence[bytes]) -> None:
        for subscription in list(self.bus.subscriptions):
            subscription.on_events(self, first, payloads)


class _MemorySubscription:
    def __init__(self, plane: MemoryEvents, prefix: str, listener: EventListener) -> None:
        self.plane = plane
        self._prefix = prefix
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.trackers: dict[tuple[str, str], SequenceTracker] = {}

    def count_lost_events(self) -> int:
        return sum(tracker.lost_events for tracker in self.trackers.values())

    def add_source(self, source: _MemorySource) -> None:
        """Follow a new source. A former epoch of the same publisher is replaced."""
        if not source.subject.startswith(self._prefix):
            return
        key = source.subject, source.publisher
        tracker = SequenceTracker(
            *key,
            source.epoch,
            self._listener,
            lambda after: self._loop.call_soon(self._send_catch_up, tracker, source, after),
            self.trackers.get(key),
        )
        self.trackers[key] = tracker
        tracker.start()

    def remove_source(self, source: _MemorySource) -> None:
        """Stop following a source and report it as gone."""
        tracker = self._tracker(source)
        if tracker is not None:
            del self.trackers[source.subject, source.publisher]
            tracker.on_source_gone()

    def on_events(self, source: _MemorySource, first: int, payloads: Sequence[bytes]) -> None:
        """Handle new events of a source."""
        tracker = self._tracker(source)
        if tracker is None or self._is_severed(source):
            return
        if not (self.plane.lossy and self.plane.lossy(first)):
            tracker.on_events(first, payloads)

    def reconnect(self, source: _MemorySource) -> None:
        """Request the events that were lost while the process was severed."""
        tracker = self._tracker(source)
        if tracker is not None and not self._is_severed(source):
            tracker.on_disconnected()
            tracker.start()

    def _is_severed(self, source: _MemorySource) -> bool:
        return self.plane.severed or source.plane.severed

    def _tracker(self, source: _MemorySource) -> SequenceTracker | None:
        tracker = self.trackers.get((source.subject, source.publisher))
        return tracker if tracker is not None and tracker.epoch == source.epoch else None

    def _send_catch_up(self, tracker: SequenceTracker, source: _MemorySource, after: int) -> None:
        if self._tracker(source) is tracker and not self._is_severed(source):
            tracker.on_catch_up(source.buffer.catch_up(after))
