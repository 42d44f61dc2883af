"""What every event plane promises. Members have `lossy` (see the backends), to drop batches."""
# ruff: noqa: S101, ARG005

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.communication.events import Event, Events

Join = Callable[[], Awaitable[Events]]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until what was heard makes it true."""
        async with asyncio.timeout(10):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    async def until_payload(self, payload: bytes) -> None:
        """Wait until it was heard."""
        await self.until(lambda: any(event.payload == payload for event in self.events))

    async def until_kind(self, kind: str) -> None:
        """Wait until the last event is of a kind."""
        await self.until(lambda: bool(self.events) and self.events[-1].kind == kind)

    def payloads(self, kind: str = "event") -> list[bytes]:
        """The payloads of one kind."""
        return [event.payload for event in self.events if event.kind == kind]


class EventsConformance:
    """Fixture: `join`."""

    async def test_every_event_arrives_once_and_in_order(self, join: Join) -> None:
        publisher, subscriber, heard = await join(), await join(), Heard()
        await subscriber.subscribe("ns/", heard)
        source = await publisher.source("ns/worker/kv", "w/1")
        for number in range(3000):
            source.publish(b"%d" % number)
            if not number % 7:
                await asyncio.sleep(0)
        await heard.until_payload(b"2999")
        assert heard.payloads() == [b"%d" % number for number in range(3000)]
        assert [event.sequence for event in heard.events] == list(range(1, 3001))
        about = {(event.subject, event.publisher, event.epoch) for event in heard.events}
        assert len(about) == 1
        assert about.pop()[:2] == ("ns/worker/kv", "w/1")
        assert subscriber.lost() == 0

    async def test_subjects_are_chosen_by_prefix(self, join: Join) -> None:
        member, heard = await join(), Heard()
        await member.subscribe("a/b", heard)
        inside, outside = await member.source("a/bc", "p"), await member.source("a/x", "p")
        outside.publish(b"no")
        inside.publish(b"yes")
        await heard.until_payload(b"yes")
        inside.publish(b"last")
        await heard.until_payload(b"last")
        assert heard.payloads() == [b"yes", b"last"]

    async def test_who_joins_late_gets_the_state_first(self, join: Join) -> None:
        publisher, subscriber, heard = await join(), await join(), Heard()
        state: list[bytes] = []
        source = await publisher.source("kv", "w", lambda: state)
        for number in range(5):
            state.append(b"s%d" % number)
            source.publish(b"before")
        await subscriber.subscribe("kv", heard)
        await heard.until_payload(b"s4")
        source.publish(b"after")
        await heard.until_payload(b"after")
        assert [event.kind for event in heard.events] == ["dump"] + ["event"] * 5
        assert [event.payload for event in heard.events] == [*state, b"after"]
        assert [event.sequence for event in heard.events] == [5] * 5 + [6]

    async def test_where_events_tell_the_whole_state_only_the_newest_is_repaired(
        self, join: Join
    ) -> None:
        publisher, subscriber, late = await join(), await join(), await join()
        heard, watcher, after = Heard(), Heard(), Heard()
        dropping = False
        plane: Any = subscriber
        plane.lossy = lambda first: dropping
        source = await publisher.source("load", "w", latest=True)
        source.publish(b"0")
        await subscriber.subscribe("load", heard)
        await publisher.subscribe("load", watcher)
        await heard.until_payload(b"0")
        await watcher.until_payload(b"0")
        for number in range(1, 10):
            dropping = 2 <= number < 6
            source.publish(b"%d" % number)
            await watcher.until_payload(b"%d" % number)
            await asyncio.sleep(0)
        await heard.until_payload(b"9")
        assert not {b"2", b"3", b"4"} & {event.payload for event in heard.events}
        await late.subscribe("load", after)
        await after.until_payload(b"9")
        assert [event.payload for event in after.events] == [b"9"]
        assert subscriber.lost() == 0

    async def test_an_empty_state_is_a_dump_too(self, join: Join) -> None:
        member, heard = await join(), Heard()
        await member.source("kv", "w", lambda: ())
        await member.subscribe("kv", heard)
        await heard.until_kind("dump")
        assert heard.payloads("dump") == [b""]

    async def test_a_gap_is_repaired_with_what_is_missing(self, join: Join) -> None:
        publisher, subscriber, heard = await join(), await join(), Heard()
        dropping = False
        plane: Any = subscriber
        plane.lossy = lambda first: dropping
        await subscriber.subscribe("kv", heard)
        source = await publisher.source("kv", "w", lambda: [b"state"])
        await heard.until_kind("dump")
        watcher = Heard()
        await publisher.subscribe("kv", watcher)
        await watcher.until_kind("dump")
        for number in range(10):
            dropping = 2 <= number < 6
            source.publish(b"%d" % number)
            await watcher.until_payload(b"%d" % number)
            await asyncio.sleep(0)
        await heard.until_payload(b"9")
        assert heard.payloads() == [b"%d" % number for number in range(10)]
        assert heard.payloads("dump") == [b"state"]
        assert len(heard.payloads("stale")) == 1
        assert subscriber.lost() == 0

    async def test_a_closed_source_is_gone_and_a_new_one_replaces_it(self, join: Join) -> None:
        publisher, subscriber, heard = await join(), await join(), Heard()
        await subscriber.subscribe("kv", heard)
        source = await publisher.source("kv", "w", lambda: [b"one"])
        await heard.until_payload(b"one")
        source.publish(b"last")
        await source.close()
        await heard.until_kind("gone")
        assert heard.payloads() == [b"last"]
        await publisher.source("kv", "w", lambda: [b"two"])
        await heard.until_payload(b"two")
        assert heard.events[-1].kind == "dump"
        assert heard.events[-1].epoch > heard.events[0].epoch

    async def test_a_new_epoch_replaces_the_old_at_once(self, join: Join) -> None:
        publisher, again, subscriber, heard = await join(), await join(), await join(), Heard()
        await subscriber.subscribe("kv", heard)
        old = await publisher.source("kv", "w", lambda: [b"one"])
        await heard.until_payload(b"one")
        await again.source("kv", "w", lambda: [b"two"])
        await heard.until_payload(b"two")
        old.publish(b"from the dead")
        await old.close()
        await publisher.close()
        new = await again.source("kv", "x")
        new.publish(b"end")
        await heard.until_payload(b"end")
        assert [event.kind for event in heard.events] == ["dump", "dump", "event"]

    async def test_a_publisher_that_closes_is_gone(self, join: Join) -> None:
        publisher, subscriber, heard = await join(), await join(), Heard()
        await subscriber.subscribe("", heard)
        source = await publisher.source("kv", "w", lambda: [b"one"])
        await heard.until_payload(b"one")
        source.publish(b"last")
        await publisher.close()
        await heard.until_kind("gone")
        assert heard.payloads() == [b"last"]

    async def test_who_unsubscribed_hears_no_more(self, join: Join) -> None:
        member, heard, other = await join(), Heard(), Heard()
        leave = await member.subscribe("kv", heard)
        await member.subscribe("kv", other)
        source = await member.source("kv", "w")
        source.publish(b"1")
        await heard.until_payload(b"1")
        leave()
        leave()
        source.publish(b"2")
        await other.until_payload(b"2")
        assert heard.payloads() == [b"1"]

    async def test_a_failing_listener_stops_nobody(self, join: Join, caplog: Any) -> None:
        member, heard = await join(), Heard()

        def broken(event: Event) -> None:
            heard(event)
            raise ValueError("listener")

        await member.subscribe("kv", broken)
        source = await member.source("kv", "w")
        source.publish(b"1")
        source.publish(b"2")
        await heard.until_payload(b"2")
        assert "listener failed" in caplog.text

    async def test_large_and_empty_events_pass(self, join: Join) -> None:
        member, heard = await join(), Heard()
        await member.subscribe("kv", heard)
        source = await member.source("kv", "w")
        payloads = [b"", bytes(3 << 20), b"x", bytes(2 << 20)]
        for payload in payloads:
            source.publish(payload)
        source.publish(b"end")
        await heard.until_payload(b"end")
        assert heard.payloads() == [*payloads, b"end"]
