"""Conformance tests for every event backend. Planes must have `lossy` (see `TcpEvents`)."""
# ruff: noqa: S101

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.communication.events import Event, Events, EventSource

JoinEvents = Callable[[], Awaitable[Events]]


class RecordingListener:
    """A listener that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait up to 10 s for an event after which the condition is true."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_payload(self, payload: bytes) -> None:
        """Wait for an event with this payload."""
        await self.wait_until(lambda: any(event.payload == payload for event in self.events))

    async def wait_for_kind(self, kind: str) -> None:
        """Wait until the last event is of this kind."""
        await self.wait_until(lambda: bool(self.events) and self.events[-1].kind == kind)

    def payloads_of_kind(self, kind: str = "event") -> list[bytes]:
        """Return the payloads of one kind in order."""
        return [event.payload for event in self.events if event.kind == kind]


def loses_second_to_fifth(first: int) -> bool:
    """Whether a frame is lost, by the sequence of its first event. The event 0 has the first."""
    return 3 <= first <= 6


async def publish_around_gap(source: EventSource, control: RecordingListener) -> None:
    """Publish 1 to 9, of which a plane may lose 2 to 5. These are sent at once, so that a repair
    between two of them finds all of them."""
    for numbers in ([1], [2, 3, 4, 5], [6], [7], [8], [9]):
        for number in numbers:
            source.publish(b"%d" % number)
        await control.wait_for_payload(b"%d" % numbers[-1])


class EventsConformance:
    """Tests of an event backend. The fixture `join` opens one more plane."""

    async def test_every_event_arrives_once_and_in_order(self, join: JoinEvents) -> None:
        publisher, subscriber, listener = await join(), await join(), RecordingListener()
        await subscriber.subscribe("ns/", listener)
        source = await publisher.open_source("ns/worker/kv", "w/1")
        for number in range(3000):
            source.publish(b"%d" % number)
            if not number % 7:
                await asyncio.sleep(0)
        await listener.wait_for_payload(b"2999")
        assert listener.payloads_of_kind() == [b"%d" % number for number in range(3000)]
        assert [event.sequence for event in listener.events] == list(range(1, 3001))
        origins = {(event.subject, event.publisher, event.epoch) for event in listener.events}
        assert len(origins) == 1
        assert origins.pop()[:2] == ("ns/worker/kv", "w/1")
        assert subscriber.count_lost_events() == 0

    async def test_subjects_are_chosen_by_prefix(self, join: JoinEvents) -> None:
        member, listener = await join(), RecordingListener()
        await member.subscribe("a/b", listener)
        inside = await member.open_source("a/bc", "p")
        outside = await member.open_source("a/x", "p")
        outside.publish(b"no")
        inside.publish(b"yes")
        await listener.wait_for_payload(b"yes")
        inside.publish(b"last")
        await listener.wait_for_payload(b"last")
        assert listener.payloads_of_kind() == [b"yes", b"last"]

    async def test_late_subscriber_gets_the_dump_first(self, join: JoinEvents) -> None:
        publisher, subscriber, listener = await join(), await join(), RecordingListener()
        state: list[bytes] = []
        source = await publisher.open_source("kv", "w", lambda: state)
        for number in range(5):
            state.append(b"s%d" % number)
            source.publish(b"before")
        await subscriber.subscribe("kv", listener)
        await listener.wait_for_payload(b"s4")
        source.publish(b"after")
        await listener.wait_for_payload(b"after")
        assert [event.kind for event in listener.events] == ["dump"] + ["event"] * 5
        assert [event.payload for event in listener.events] == [*state, b"after"]
        assert [event.sequence for event in listener.events] == [5] * 5 + [6]

    async def test_latest_source_repairs_only_the_newest_event(self, join: JoinEvents) -> None:
        publisher, subscriber, late = await join(), await join(), await join()
        listener, control_listener, late_listener = (RecordingListener() for _ in range(3))
        plane: Any = subscriber
        plane.lossy = loses_second_to_fifth
        source = await publisher.open_source("load", "w", latest=True)
        source.publish(b"0")
        await subscriber.subscribe("load", listener)
        await publisher.subscribe("load", control_listener)
        await listener.wait_for_payload(b"0")
        await control_listener.wait_for_payload(b"0")
        await publish_around_gap(source, control_listener)
        await listener.wait_for_payload(b"9")
        assert not {b"2", b"3", b"4"} & {event.payload for event in listener.events}
        await late.subscribe("load", late_listener)
        await late_listener.wait_for_payload(b"9")
        assert [event.payload for event in late_listener.events] == [b"9"]
        assert subscriber.count_lost_events() == 0

    async def test_an_empty_state_is_a_dump_too(self, join: JoinEvents) -> None:
        member, listener = await join(), RecordingListener()
        await member.open_source("kv", "w", lambda: ())
        await member.subscribe("kv", listener)
        await listener.wait_for_kind("dump")
        assert listener.payloads_of_kind("dump") == [b""]

    async def test_gap_is_repaired_with_missing_events(self, join: JoinEvents) -> None:
        publisher, subscriber, listener = await join(), await join(), RecordingListener()
        plane: Any = subscriber
        plane.lossy = loses_second_to_fifth
        await subscriber.subscribe("kv", listener)
        source = await publisher.open_source("kv", "w", lambda: [b"state"])
        await listener.wait_for_kind("dump")
        control_listener = RecordingListener()
        await publisher.subscribe("kv", control_listener)
        await control_listener.wait_for_kind("dump")
        source.publish(b"0")
        await publish_around_gap(source, control_listener)
        await listener.wait_for_payload(b"9")
        assert listener.payloads_of_kind() == [b"%d" % number for number in range(10)]
        assert listener.payloads_of_kind("dump") == [b"state"]
        assert len(listener.payloads_of_kind("stale")) == 1
        assert subscriber.count_lost_events() == 0

    async def test_a_closed_source_is_gone_and_a_new_one_replaces_it(
        self, join: JoinEvents
    ) -> None:
        publisher, subscriber, listener = await join(), await join(), RecordingListener()
        await subscriber.subscribe("kv", listener)
        source = await publisher.open_source("kv", "w", lambda: [b"one"])
        await listener.wait_for_payload(b"one")
        source.publish(b"last")
        await source.close()
        await listener.wait_for_kind("gone")
        assert listener.payloads_of_kind() == [b"last"]
        await publisher.open_source("kv", "w", lambda: [b"two"])
        await listener.wait_for_payload(b"two")
        assert listener.events[-1].kind == "dump"
        assert listener.events[-1].epoch > listener.events[0].epoch

    async def test_a_new_epoch_replaces_the_old_at_once(self, join: JoinEvents) -> None:
        publisher, restarted, subscriber = await join(), await join(), await join()
        listener = RecordingListener()
        await subscriber.subscribe("kv", listener)
        old = await publisher.open_source("kv", "w", lambda: [b"one"])
        await listener.wait_for_payload(b"one")
        await restarted.open_source("kv", "w", lambda: [b"two"])
        await listener.wait_for_payload(b"two")
        old.publish(b"from the dead")
        await old.close()
        await publisher.close()
        new = await restarted.open_source("kv", "x")
        new.publish(b"end")
        await listener.wait_for_payload(b"end")
        assert [event.kind for event in listener.events] == ["dump", "dump", "event"]

    async def test_a_publisher_that_closes_is_gone(self, join: JoinEvents) -> None:
        publisher, subscriber, listener = await join(), await join(), RecordingListener()
        await subscriber.subscribe("", listener)
        source = await publisher.open_source("kv", "w", lambda: [b"one"])
        await listener.wait_for_payload(b"one")
        source.publish(b"last")
        await publisher.close()
        await listener.wait_for_kind("gone")
        assert listener.payloads_of_kind() == [b"last"]

    async def test_unsubscribed_listener_gets_no_events(self, join: JoinEvents) -> None:
        member, listener, other = await join(), RecordingListener(), RecordingListener()
        unsubscribe = await member.subscribe("kv", listener)
        await member.subscribe("kv", other)
        source = await member.open_source("kv", "w")
        source.publish(b"1")
        await listener.wait_for_payload(b"1")
        unsubscribe()
        unsubscribe()
        source.publish(b"2")
        await other.wait_for_payload(b"2")
        assert listener.payloads_of_kind() == [b"1"]

    async def test_failing_listener_does_not_stop_others(
        self, join: JoinEvents, caplog: Any
    ) -> None:
        member, listener = await join(), RecordingListener()

        def broken(event: Event) -> None:
            listener(event)
            raise ValueError("listener")

        await member.subscribe("kv", broken)
        source = await member.open_source("kv", "w")
        source.publish(b"1")
        source.publish(b"2")
        await listener.wait_for_payload(b"2")
        assert "listener failed" in caplog.text

    async def test_large_and_empty_events_pass(self, join: JoinEvents) -> None:
        member, listener = await join(), RecordingListener()
        await member.subscribe("kv", listener)
        source = await member.open_source("kv", "w")
        payloads = [b"", bytes(3 << 20), b"x", bytes(2 << 20)]
        for payload in payloads:
            source.publish(payload)
        source.publish(b"end")
        await listener.wait_for_payload(b"end")
        assert listener.payloads_of_kind() == [*payloads, b"end"]
