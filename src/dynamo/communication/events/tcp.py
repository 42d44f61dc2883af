"""The event plane over connections: subscribers connect to every publishing process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Self

import msgspec

from dynamo.communication.directory import Directory
from dynamo.communication.events.plane import (
    MAX_RING_BYTES,
    Dump,
    EventListener,
    Events,
    EventSource,
)
from dynamo.communication.events.protocol import (
    CAUGHT_UP,
    DUMP,
    EVENTS,
    FOLLOW,
    GONE,
    PLANE,
    REPLAY,
    SKIPPED,
    pack_events,
    pack_position,
    unpack_position,
)
from dynamo.communication.events.records import SourceKey, SourceRecord
from dynamo.communication.events.source import BufferedEventSource, new_epoch
from dynamo.communication.events.subscriber_connection import Broadcast, SubscriptionContext
from dynamo.communication.events.subscription import Subscription
from dynamo.communication.frames import pack_number
from dynamo.communication.handshake import ServerHandshake
from dynamo.communication.link import Link, TurnFlusher, close_links
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transports import PlaneTransport, TcpPlaneTransport
from dynamo.core.errors import ProtocolError
from dynamo.core.tasks import BackgroundTasks

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


class TcpEvents(Events):
    """The backend `tcp://HOST:PORT`, where port 0 means any free port.

    Opening the first source starts listening. With a `broadcast`, new events are sent once through
    it instead of to each subscriber. Tests of repair set `lossy` before they subscribe: received
    batches whose first sequence it maps to True are dropped.
    """

    def __init__(
        self, transport: PlaneTransport, directory: Directory, broadcast: Broadcast | None = None
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._broadcast = broadcast
        self._flusher = TurnFlusher()
        self._tasks = BackgroundTasks()
        self._listen_lock = asyncio.Lock()
        self._sources: dict[int, BufferedEventSource] = {}
        self._last_number = 0
        self._subscribers: dict[PublisherConnection, None] = {}
        self._subscriptions: dict[Subscription, None] = {}
        self._lost_events = 0
        self.lossy: Callable[[int], bool] | None = None

    @classmethod
    async def open(
        cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
    ) -> Self:
        """Create a plane that does not listen yet. Raises `ConfigError`."""
        return cls(await TcpPlaneTransport.open(url, options), directory)

    async def open_source(
        self,
        subject: str,
        publisher: str,
        dump: Dump | None = None,
        *,
        latest: bool = False,
        max_bytes: int = MAX_RING_BYTES,
    ) -> EventSource:
        async with self._listen_lock:
            if not self._transport.is_listening:
                await self._transport.listen(self._accept)
        self._last_number = number = self._last_number + 1
        key = str(SourceKey(subject, publisher, new_epoch()))
        source = BufferedEventSource(
            dump,
            self._flusher.schedule,
            partial(self._send_events, subject, number),
            partial(self._close_source, subject, number, key),
            latest=latest,
            max_bytes=max_bytes,
        )
        self._sources[number] = source
        record = SourceRecord(self._transport.address, number)
        await self._directory.put(key, msgspec.json.encode(record))
        return source

    async def subscribe(self, prefix: str, listener: EventListener) -> Callable[[], None]:
        subscription = Subscription(
            prefix,
            listener,
            self._directory,
            self._tasks,
            SubscriptionContext(self._transport, self._flusher, self._broadcast, self.lossy),
        )
        self._subscriptions[subscription] = None
        await subscription.start()
        return partial(self._unsubscribe, subscription)

    def count_lost_events(self) -> int:
        return self._lost_events + sum(
            subscription.count_lost_events() for subscription in self._subscriptions
        )

    async def close(self) -> None:
        for subscription in list(self._subscriptions):
            self._unsubscribe(subscription)
        for source in list(self._sources.values()):
            await source.close()
        await self._tasks.close()
        self._transport.stop_listening()
        await close_links([subscriber.link for subscriber in self._subscribers])

    def abort(self) -> None:
        """Abort every connection, as a crash would. For tests."""
        self._transport.stop_listening()
        for subscriber in list(self._subscribers):
            subscriber.link.abort()

    def _accept(self) -> Link:
        subscriber = PublisherConnection(
            self._sources, self._flusher, self._transport, self._on_subscriber_lost
        )
        self._subscribers[subscriber] = None
        return subscriber.link

    def _on_subscriber_lost(self, subscriber: PublisherConnection) -> None:
        self._subscribers.pop(subscriber, None)

    def _send_events(
        self, subject: str, number: int, first: int, payloads: Sequence[bytes]
    ) -> None:
        if self._broadcast is not None:
            last = first + len(payloads) - 1
            self._broadcast.send(
                subject, number, pack_events(EVENTS, number, first, payloads), last
            )
        elif self._subscribers:
            frames = pack_events(EVENTS, number, first, payloads)
            for subscriber in self._subscribers:
                subscriber.send(number, frames)

    async def _close_source(self, subject: str, number: int, key: str) -> None:
        if self._sources.pop(number, None) is not None:
            if self._broadcast is not None:
                self._broadcast.send_end(subject, number, pack_number(GONE, number))
            else:
                for subscriber in self._subscribers:
                    subscriber.on_source_closed(number)
            await self._directory.delete(key)

    def _unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            del self._subscriptions[subscription]
            subscription.stop()
            self._lost_events += subscription.count_lost_events()
