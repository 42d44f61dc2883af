"""Events through NATS: new ones by a subject each source has, what was missed over wires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.messages import SKIPPED, pack_place
from dynamo.communication.events.plane import Dump, Events, Listener, Source
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.nats_link import NatsLink, subject_token
from dynamo.communication.nats_wires import NatsWires
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.core.tasks import Tasks

ROOT: Final = "dynamo.events"
STREAM: Final = "dynamo-events"
BEAT_S: Final = 1.0


class NatsBroadcast:
    """`dynamo.events.{subject}.{incarnation}.{number}`. What a follower did not get it learns from
    the next event, or at the latest from the beat, a second after the last one: the number reached
    so far. An event too large for a message is told by its number alone."""

    def __init__(self, nats: NatsLink, incarnation: str) -> None:
        self._nats = nats
        self._incarnation = incarnation
        self._reached: dict[str, tuple[int, int]] = {}
        self._fresh: set[str] = set()
        self._beating: asyncio.TimerHandle | None = None
        nats.on_state(self._changed)

    def send(self, subject: str, number: int, frames: Sequence[bytes], last: int) -> None:
        """New events."""
        topic = _topic(subject, self._incarnation, number)
        self._reached[topic] = number, last
        self._fresh.add(topic)
        if max(map(len, frames)) > self._nats.max_payload_bytes:
            self._beat(topic)
        else:
            for frame in frames:
                self._nats.publish(topic, frame)
        if self._beating is None:
            loop = asyncio.get_running_loop()
            self._beating = loop.call_later(BEAT_S, self._beat_all)

    def end(self, subject: str, number: int, frame: bytes) -> None:
        """A source's last word."""
        topic = _topic(subject, self._incarnation, number)
        self._reached.pop(topic, None)
        self._fresh.discard(topic)
        self._nats.publish(topic, frame)

    def tune(
        self, subject: str, incarnation: str, number: int, take: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Hear one source."""
        topic = _topic(subject, incarnation, number)
        return self._nats.listen(topic, lambda _, payload, __, ___: take(payload))

    def close(self) -> None:
        """Beat no more."""
        if self._beating is not None:
            self._beating.cancel()

    def _beat(self, topic: str) -> None:
        self._nats.publish(topic, pack_place(SKIPPED, *self._reached[topic]))

    def _beat_all(self) -> None:
        self._beating = None
        fresh, self._fresh = self._fresh, set()
        for topic in fresh:
            self._beat(topic)

    def _changed(self, up: bool) -> None:
        """What was published while NATS was away reached nobody."""
        if up:
            for topic in self._reached:
                self._beat(topic)


class NatsEvents(Events):
    """`nats://HOST:PORT`. Numbering, gaps and repair are those of `tcp:`."""

    def __init__(self, nats: NatsLink, wires: NatsWires, directory: Directory) -> None:
        self._nats = nats
        self._wires = wires
        self._broadcast = NatsBroadcast(nats, wires.incarnation)
        self._tasks = Tasks()
        self._events = TcpEvents(wires, directory, self._broadcast)

    @classmethod
    async def open(cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT) -> Self:
        """NATS is dialled in the background. Raises `ConfigError`."""
        link = await NatsLink.open(url, options)
        made = cls(link, NatsWires(link, options), directory)
        if options.keep_events_s:
            made.keep(options.keep_events_s)
        return made

    def keep(self, age_s: float) -> None:
        """Have JetStream keep all events of this NATS so long, from whenever it is there."""

        def changed(up: bool) -> None:
            if up:
                self._tasks.start(self._nats.keep(STREAM, f"{ROOT}.>", age_s), "keep events")

        self._nats.on_state(changed)

    @property
    def trouble(self) -> str:
        return self._nats.trouble

    @property
    def lossy(self) -> Callable[[int], bool] | None:
        """See `TcpEvents`."""
        return self._events.lossy

    @lossy.setter
    def lossy(self, drops: Callable[[int], bool] | None) -> None:
        self._events.lossy = drops

    async def source(
        self, subject: str, publisher: str, dump: Dump | None = None, *, latest: bool = False
    ) -> Source:
        return await self._events.source(subject, publisher, dump, latest=latest)

    async def subscribe(self, prefix: str, listener: Listener) -> Callable[[], None]:
        return await self._events.subscribe(prefix, listener)

    def lost(self) -> int:
        return self._events.lost()

    async def close(self) -> None:
        self._broadcast.close()
        await self._tasks.close()
        await self._events.close()
        await self._nats.close()
        self._wires.leave()


def _topic(subject: str, incarnation: str, number: int) -> str:
    tokens = ".".join(subject_token(part) for part in subject.replace("/", ".").split("."))
    return f"{ROOT}.{tokens}.{incarnation}.{number}"
