"""Memory planes while the network is broken between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dynamo.communication.events import Event
from dynamo.communication.events.memory import MemoryEvents
from dynamo.communication.requests import ResponseWriter
from dynamo.communication.requests.memory import MemoryRequests
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import BackgroundTasks


class Served:
    """A worker that says what it is told to, a caller, and one call between them."""

    def __init__(self) -> None:
        self.outgoing: ResponseWriter | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.heard: list[bytes] = []

    async def start(self, tasks: BackgroundTasks) -> None:
        self.here = await MemoryRequests.open("memory:")
        self.there = await MemoryRequests.open("memory:")
        await self.there.serve("say", self._say)
        self.call = tasks.start(self._call())
        await self.begun.wait()

    async def _call(self) -> None:
        def sink(payload: bytes) -> bool:
            self.heard.append(payload)
            return True

        await self.here.call(self.there.address, "say", b"", Context("r"), sink)

    async def _say(self, payload: bytes, outgoing: ResponseWriter) -> None:
        self.outgoing = outgoing
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()

    async def say(self, payload: bytes) -> None:
        assert self.outgoing is not None
        self.outgoing.send(payload)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        await made.start(tasks)
        yield made
        await made.there.close()
        await made.here.close()


async def test_what_is_said_meanwhile_arrives_in_order(served: Served) -> None:
    await served.say(b"1")
    served.there.sever()
    await served.say(b"2")
    await served.say(b"3")
    assert served.heard == [b"1"]
    served.there.rejoin()
    await served.say(b"4")
    assert served.heard == [b"1", b"2", b"3", b"4"]


async def test_who_gives_up_fails_at_once_and_the_other_end_learns_later(served: Served) -> None:
    served.there.sever()
    await served.say(b"late")
    served.here.disconnect(served.there.address)
    with pytest.raises(WorkerFailed):
        await served.call
    await served.say(b"later")
    assert not served.over.is_set()
    served.there.rejoin()
    await served.over.wait()
    await served.say(b"latest")
    assert served.heard == []


async def test_a_death_meanwhile_is_heard_of_later(served: Served) -> None:
    served.there.sever()
    served.there.abort()
    await served.over.wait()
    await asyncio.sleep(0)
    assert not served.call.done()
    served.there.rejoin()
    with pytest.raises(WorkerFailed):
        await served.call


async def test_events_that_were_lost_are_asked_for() -> None:
    here, there = MemoryEvents("severed"), MemoryEvents("severed")
    events: list[Event] = []
    source = await there.open_source("s", "p")
    await here.subscribe("s", events.append)

    async def told(payload: bytes) -> list[tuple[str, bytes]]:
        source.publish(payload)
        for _ in range(3):
            await asyncio.sleep(0)
        return [(event.kind, event.payload) for event in events]

    await asyncio.sleep(0)
    assert await told(b"1") == [("event", b"1")]
    there.sever()
    assert await told(b"2") == [("event", b"1")]
    there.rejoin()
    kinds = await told(b"3")
    assert kinds == [("event", b"1"), ("stale", b""), ("event", b"2"), ("event", b"3")]
    await here.close()
    await there.close()
