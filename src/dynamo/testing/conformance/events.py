"""What every event plane promises. Members have `lossy` (see the backends), to drop batches."""
# ruff: noqa: S101, ARG005

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.communication.events import Event, Events

JoinEvents = Callable[[], Awaitable[Events]]


class RecordingListener:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until what was heard makes it true."""
        async with asyncio.timeout(10):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_payload(self, payload: bytes) -> None:
        """Wait until it was heard."""
        await self.wait_until(lambda: any(event.payload == payload for event in self.events))

    async def wait_for_kind(self, kind: str) -> None:
        """Wait until the last event is of a kind."""
        await self.wait_until(lambda: bool(self.events) and self.events[-1].kind == kind)

    def payloads_of_kind(self, kind: str = "event") -> list[bytes]:
        """The payloads of one kind."""
        return [event.payload for event in self.events if event.kind == kind]


class EventsConformance:
    """Fixture: `join`."""

    async def test_every_event_arrives_once_and_in_order(self, join: JoinEvents) -> None:
        publisher, subscriber, heard = await join(), await join(), RecordingListener()
        await subscriber.subscribe("ns/", heard)
        source = await publisher.open_source("ns/worker/kv", "w/1")
        for number in range(3000):
            source.publish(b"%d" % number)
            if not number % 7:
                await asyncio.sleep(0)
        await heard.wait_for_payload(b"2999")
        assert heard.payloads_of_kind() == [b"%d" % number for number in range(3000)]
        assert [event.sequence for event in heard.events] == list(range(1, 3001))
        about = {(event.subject, event.publisher, event.epoch) for event in heard.events}
        assert len(about) == 1
        assert about.pop()[:2] == ("ns/worker/kv", "w/1")
        assert subscriber.count_lost_events() == 0

    async def test_subjects_are_chosen_by_prefix(self, join: JoinEvents) -> None:
        member, heard = await join(), RecordingListener()
        await member.subscribe("a/b", heard)
        inside, outside = (
            await member.open_source("a/bc", "p"),
            await member.open_source("a/x", "p"),
        )
        outside.publish(b"no")
        inside.publish(b"yes")
        await heard.wait_for_payload(b"yes")
        inside.publish(b"last")
        await heard.wait_for_payload(b"last")
        assert heard.payloads_of_kind() == [b"yes", b"last"]

    async def test_late_subscriber_gets_the_dump_first(self, join: JoinEvents) -> None:
        publisher, subscriber, heard = await join(), await join(), RecordingListener()
        state: list[bytes] = []
        source = await publisher.open_source("kv", "w", lambda: state)
        for number in range(5):
            state.append(b"s%d" % number)
            source.publish(b"before")
        await subscriber.subscribe("kv", heard)
        await heard.wait_for_payload(b"s4")
        source.publish(b"after")
        await heard.wait_for_payload(b"after")
        assert [event.kind for event in heard.events] == ["dump"] + ["event"] * 5
        assert [event.payload for event in heard.events] == [*state, b"after"]
        assert [event.sequence for event in heard.events] == [5] * 5 + [6]

    async def test_latest_source_repairs_only_the_newest_event(self, join: JoinEvents) -> None:
        publisher, subscriber, late = await join(), await join(), await join()
        heard, watcher, after = RecordingListener(), RecordingListener(), RecordingListener()
        dropping = False
        plane: Any = subscriber
        plane.lossy = lambda first: dropping
        source = await publisher.open_source("load", "w", latest=True)
        source.publish(b"0")
        await subscriber.subscribe("load", heard)
        await publisher.subscribe("load", watcher)
        await heard.wait_for_payload(b"0")
        await watcher.wait_for_payload(b"0")
        for number in range(1, 10):
            dropping = 2 <= number < 6
            source.publish(b"%d" % number)
            await watcher.wait_for_payload(b"%d" % number)
            await asyncio.sleep(0)
        await heard.wait_for_payload(b"9")
        assert not {b"2", b"3", b"4"} & {event.payload for event in heard.events}
        await late.subscribe("load", after)
        await after.wait_for_payload(b"9")
        assert [event.payload for event in after.events] == [b"9"]
        assert subscriber.count_lost_events() == 0

    async def test_an_empty_state_is_a_dump_too(self, join: JoinEvents) -> None:
        member, heard = await join(), RecordingListener()
        await member.open_source("kv", "w", lambda: ())
        await member.subscribe("kv", heard)
        await heard.wait_for_kind("dump")
        assert heard.payloads_of_kind("dump") == [b""]

    async def test_gap_is_repaired_with_missing_events(self, join: JoinEvents) -> None:
        publisher, subscriber, heard = await join(), await join(), RecordingListener()
        dropping = False
        plane: Any = subscriber
        plane.lossy = lambda first: dropping
        await subscriber.subscribe("kv", heard)
        source = await publisher.open_source("kv", "w", lambda: [b"state"])
        await heard.wait_for_kind("dump")
        watcher = RecordingListener()
        await publisher.subscribe("kv", watcher)
        await watcher.wait_for_kind("dump")
        for number in range(10):
            dropping = 2 <= number < 6
            source.publish(b"%d" % number)
            await watcher.wait_for_payload(b"%d" % number)
            await asyncio.sleep(0)
        await heard.wait_for_payload(b"9")
        assert heard.payloads_of_kind() == [b"%d" % number for number in range(10)]
        assert heard.payloads_of_kind("dump") == [b"state"]
        assert len(heard.payloads_of_kind("stale")) == 1
        assert subscriber.count_lost_events() == 0

    async def test_a_closed_source_is_gone_and_a_new_one_replaces_it(
        self, join: JoinEvents
    ) -> None:
        publisher, subscriber, heard = await join(), await join(), RecordingListener()
        await subscriber.subscribe("kv", heard)
        source = await publisher.open_source("kv", "w", lambda: [b"one"])
        await heard.wait_for_payload(b"one")
        source.publish(b"last")
        await source.close()
        await heard.wait_for_kind("gone")
        assert heard.payloads_of_kind() == [b"last"]
        await publisher.open_source("kv", "w", lambda: [b"two"])
        await heard.wait_for_payload(b"two")
        assert heard.events[-1].kind == "dump"
        assert heard.events[-1].epoch > heard.events[0].epoch

    async def test_a_new_epoch_replaces_the_old_at_once(self, join: JoinEvents) -> None:
        publisher, again, subscriber, heard = (
            await join(),
            await join(),
            await join(),
            RecordingListener(),
        )
        await subscriber.subscribe("kv", heard)
        old = await publisher.open_source("kv", "w", lambda: [b"one"])
        await heard.wait_for_payload(b"one")
        await again.open_source("kv", "w", lambda: [b"two"])
        await heard.wait_for_payload(b"two")
        old.publish(b"from the dead")
        await old.close()
        await publisher.close()
        new = await again.open_source("kv", "x")
        new.publish(b"end")
        await heard.wait_for_payload(b"end")
        assert [event.kind for event in heard.events] == ["dump", "dump", "event"]

    async def test_a_publisher_that_closes_is_gone(self, join: JoinEvents) -> None:
        publisher, subscriber, heard = await join(), await join(), RecordingListener()
        await subscriber.subscribe("", heard)
        source = await publisher.open_source("kv", "w", lambda: [b"one"])
        await heard.wait_for_payload(b"one")
        source.publish(b"last")
        await publisher.close()
        await heard.wait_for_kind("gone")
        assert heard.payloads_of_kind() == [b"last"]

    async def test_unsubscribed_listener_gets_no_events(self, join: JoinEvents) -> None:
        member, heard, other = await join(), RecordingListener(), RecordingListener()
        leave = await member.subscribe("kv", heard)
        await member.subscribe("kv", other)
        source = await member.open_source("kv", "w")
        source.publish(b"1")
        await heard.wait_for_payload(b"1")
        leave()
        leave()
        source.publish(b"2")
        await other.wait_for_payload(b"2")
        assert heard.payloads_of_kind() == [b"1"]

    async def test_failing_listener_does_not_stop_others(
        self, join: JoinEvents, caplog: Any
    ) -> None:
        member, heard = await join(), RecordingListener()

        def broken(event: Event) -> None:
            heard(event)
            raise ValueError("listener")

        await member.subscribe("kv", broken)
        source = await member.open_source("kv", "w")
        source.publish(b"1")
        source.publish(b"2")
        await heard.wait_for_payload(b"2")
        assert "listener failed" in caplog.text

    async def test_large_and_empty_events_pass(self, join: JoinEvents) -> None:
        member, heard = await join(), RecordingListener()
        await member.subscribe("kv", heard)
        source = await member.open_source("kv", "w")
        payloads = [b"", bytes(3 << 20), b"x", bytes(2 << 20)]
        for payload in payloads:
            source.publish(payload)
        source.publish(b"end")
        await heard.wait_for_payload(b"end")
        assert heard.payloads_of_kind() == [*payloads, b"end"]
