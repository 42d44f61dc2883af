"""Events through NATS: new ones by a subject each source has, what was missed over wires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.plane import Dump, EventListener, Events, EventSource
from dynamo.communication.events.protocol import SKIPPED, pack_position
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.nats_client import NatsClient, subject_token
from dynamo.communication.nats_transport import NatsPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.tasks import BackgroundTasks

SUBJECT_ROOT: Final = "dynamo.events"
STREAM_NAME: Final = "dynamo-events"
HEARTBEAT_S: Final = 1.0


class NatsBroadcast:
    """`dynamo.events.{subject}.{incarnation}.{number}`. What a follower did not get it learns from
    the next event, or at the latest from the beat, a second after the last one: the number reached
    so far. An event too large for a message is told by its number alone."""

    def __init__(self, nats: NatsClient, incarnation: str) -> None:
        self._nats = nats
        self._incarnation = incarnation
        self._last_sequences: dict[str, tuple[int, int]] = {}
        self._recent_topics: set[str] = set()
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        nats.on_connection_change(self._on_connection_change)

    def send(self, subject: str, number: int, frames: Sequence[bytes], last: int) -> None:
        """New events."""
        topic = _topic(subject, self._incarnation, number)
        self._last_sequences[topic] = number, last
        self._recent_topics.add(topic)
        if max(map(len, frames)) > self._nats.max_payload_bytes:
            self._send_heartbeat(topic)
        else:
            for frame in frames:
                self._nats.publish(topic, frame)
        if self._heartbeat_timer is None:
            loop = asyncio.get_running_loop()
            self._heartbeat_timer = loop.call_later(HEARTBEAT_S, self._send_heartbeats)

    def send_end(self, subject: str, number: int, frame: bytes) -> None:
        """A source's last word."""
        topic = _topic(subject, self._incarnation, number)
        self._last_sequences.pop(topic, None)
        self._recent_topics.discard(topic)
        self._nats.publish(topic, frame)

    def subscribe(
        self, subject: str, incarnation: str, number: int, take: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Hear one source."""
        topic = _topic(subject, incarnation, number)
        return self._nats.subscribe(topic, lambda _, payload, __, ___: take(payload))

    def close(self) -> None:
        """Beat no more."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()

    def _send_heartbeat(self, topic: str) -> None:
        self._nats.publish(topic, pack_position(SKIPPED, *self._last_sequences[topic]))

    def _send_heartbeats(self) -> None:
        self._heartbeat_timer = None
        fresh, self._recent_topics = self._recent_topics, set()
        for topic in fresh:
            self._send_heartbeat(topic)

    def _on_connection_change(self, up: bool) -> None:
        """What was published while NATS was away reached nobody."""
        if up:
            for topic in self._last_sequences:
                self._send_heartbeat(topic)


class NatsEvents(Events):
    """`nats://HOST:PORT`. Numbering, gaps and repair are those of `tcp:`."""

    def __init__(self, nats: NatsClient, wires: NatsPlaneTransport, directory: Directory) -> None:
        self._nats = nats
        self._transport = wires
        self._broadcast = NatsBroadcast(nats, wires.incarnation)
        self._tasks = BackgroundTasks()
        self._framed_events = TcpEvents(wires, directory, self._broadcast)

    @classmethod
    async def open(
        cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
    ) -> Self:
        """NATS is dialled in the background. Raises `ConfigError`."""
        link = await NatsClient.open(url, options)
        made = cls(link, NatsPlaneTransport(link, options), directory)
        if options.event_retention_s:
            made.retain_events(options.event_retention_s)
        return made

    def retain_events(self, age_s: float) -> None:
        """Have JetStream keep all events of this NATS so long, from whenever it is there."""

        def changed(up: bool) -> None:
            if up:
                self._tasks.start(
                    self._nats.ensure_stream(STREAM_NAME, f"{SUBJECT_ROOT}.>", age_s), "keep events"
                )

        self._nats.on_connection_change(changed)

    @property
    def connection_error(self) -> str:
        return self._nats.connection_error

    @property
    def lossy(self) -> Callable[[int], bool] | None:
        """See `TcpEvents`."""
        return self._framed_events.lossy

    @lossy.setter
    def lossy(self, drops: Callable[[int], bool] | None) -> None:
        self._framed_events.lossy = drops

    async def open_source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> EventSource:
        return await self._framed_events.open_source(subject, publisher, dump, latest=latest)

    async def subscribe(self, prefix: str, listener: EventListener) -> Callable[[], None]:
        return await self._framed_events.subscribe(prefix, listener)

    def count_lost_events(self) -> int:
        return self._framed_events.count_lost_events()

    async def close(self) -> None:
        self._broadcast.close()
        await self._tasks.close()
        await self._framed_events.close()
        await self._nats.close()
        self._transport.close()


def _topic(subject: str, incarnation: str, number: int) -> str:
    tokens = ".".join(subject_token(part) for part in subject.replace("/", ".").split("."))
    return f"{SUBJECT_ROOT}.{tokens}.{incarnation}.{number}"
