"""The event plane over NATS: events by NATS subjects, catch-ups over connections through NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self

from dynamo.communication.directory import Directory
from dynamo.communication.events.protocol import SKIPPED, pack_position
from dynamo.communication.events.tcp import TcpEvents
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.nats_transport import NatsPlaneTransport
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions

SUBJECT_ROOT: Final = "dynamo.events"
STREAM_NAME: Final = "dynamo-events"
HEARTBEAT_S: Final = 1.0


class NatsBroadcast:
    """Broadcasts events at `dynamo.events.{subject}.{incarnation}.{number}`.

    Subscribers notice lost events by the sequence of the next event, or of the heartbeat one second
    after the last event. For an event larger than a NATS message only its sequence is sent.
    """

    def __init__(self, nats: NatsClient, incarnation: str) -> None:
        self._nats = nats
        self._incarnation = incarnation
        self._last_sequences: dict[str, tuple[int, int]] = {}
        self._recent_topics: set[str] = set()
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        nats.on_connection_change(self._on_connection_change)

    def send(self, subject: str, number: int, frames: Sequence[bytes], last: int) -> None:
        """Send new events of a source of this process."""
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
        """Send the GONE frame of a source."""
        topic = _topic(subject, self._incarnation, number)
        self._last_sequences.pop(topic, None)
        self._recent_topics.discard(topic)
        self._nats.publish(topic, frame)

    def subscribe(
        self, subject: str, incarnation: str, number: int, on_frame: Callable[[bytes], None]
    ) -> Callable[[], None]:
        """Call `on_frame` with each frame of a source. Returns a function that unsubscribes."""
        topic = _topic(subject, incarnation, number)
        return self._nats.subscribe(topic, lambda _, payload, __, ___: on_frame(payload))

    def close(self) -> None:
        """Stop the heartbeats."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()

    def _send_heartbeat(self, topic: str) -> None:
        self._nats.publish(topic, pack_position(SKIPPED, *self._last_sequences[topic]))

    def _send_heartbeats(self) -> None:
        self._heartbeat_timer = None
        topics, self._recent_topics = self._recent_topics, set()
        for topic in topics:
            self._send_heartbeat(topic)

    def _on_connection_change(self, up: bool) -> None:
        """Send the last sequences after a reconnect: events published before it were dropped."""
        if up:
            for topic in self._last_sequences:
                self._send_heartbeat(topic)


class NatsEvents(TcpEvents):
    """The backend `nats://HOST:PORT`. Numbering, gaps and repair are those of `tcp:`."""

    def __init__(
        self, nats: NatsClient, transport: NatsPlaneTransport, directory: Directory
    ) -> None:
        self._nats = nats
        self._nats_transport = transport
        self._nats_broadcast = NatsBroadcast(nats, transport.incarnation)
        super().__init__(transport, directory, self._nats_broadcast)

    @classmethod
    async def open(
        cls, url: str, directory: Directory, options: PlaneOptions = DEFAULT_OPTIONS
    ) -> Self:
        """Start connecting to NATS in the background. Raises `ConfigError`."""
        nats = await NatsClient.open(url, options)
        plane = cls(nats, NatsPlaneTransport(nats, options), directory)
        if options.event_retention_s:
            plane.retain_events(options.event_retention_s)
        return plane

    def retain_events(self, age_s: float) -> None:
        """Have JetStream store all events of this NATS for `age_s`, set up at each connect."""

        def on_connection_change(up: bool) -> None:
            if up:
                self._tasks.start(
                    self._nats.ensure_stream(STREAM_NAME, f"{SUBJECT_ROOT}.>", age_s), "keep events"
                )

        self._nats.on_connection_change(on_connection_change)

    @property
    def connection_error(self) -> str:
        return self._nats.connection_error

    async def close(self) -> None:
        self._nats_broadcast.close()
        await super().close()
        await self._nats.close()
        self._nats_transport.close()


def _topic(subject: str, incarnation: str, number: int) -> str:
    tokens = ".".join(subject_token(part) for part in subject.replace("/", ".").split("."))
    return f"{SUBJECT_ROOT}.{tokens}.{incarnation}.{number}"


def subject_token(text: str) -> str:
    """Encode `text` as one token of a subject. Characters that NATS refuses become %XX."""
    token = "".join(
        char if char.isascii() and (char.isalnum() or char in "-_") else f"%{ord(char):02X}"
        for char in text
    )
    return token or "%"
