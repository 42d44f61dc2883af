"""The secondary runtime and discovery planes that run on it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from dynamo.communication.discovery import RecordChange, RecordWatch
from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.core.errors import PlaneUnavailable
from dynamo.runtime.background import InlineBackground, ThreadBackground
from dynamo.runtime.discovery import BackgroundDiscovery, RepublishingDiscovery


@pytest.fixture
async def background() -> AsyncIterator[ThreadBackground]:
    thread = ThreadBackground()
    yield thread
    await thread.close()
    await thread.close()


async def open_memory(name: str) -> MemoryDiscovery:
    return await MemoryDiscovery.open(f"memory:{name}")


async def open_discovery(background: ThreadBackground, name: str) -> BackgroundDiscovery:
    inner = await background.run(open_memory(name))

    async def wrap() -> RepublishingDiscovery:
        return RepublishingDiscovery(inner)

    return BackgroundDiscovery(await background.run(wrap()), background)


async def test_work_runs_on_its_own_thread(background: ThreadBackground) -> None:
    async def thread_id() -> int:
        return threading.get_ident()

    assert await background.run(thread_id()) != threading.get_ident()
    assert await InlineBackground().run(thread_id()) == threading.get_ident()


async def test_a_busy_primary_does_not_block_the_secondary(background: ThreadBackground) -> None:
    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    heartbeat_future = background.submit(heartbeat())
    before = beats
    end = time.monotonic() + 5
    while beats < before + 5 and time.monotonic() < end:
        sum(range(1000))  # blocks the loop of this test
    assert beats >= before + 5
    heartbeat_future.cancel()


async def test_cancelling_the_wait_cancels_the_work(background: ThreadBackground) -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await background.run(work())
    await asyncio.to_thread(cancelled.wait, 10)
    assert cancelled.is_set()


async def test_errors_of_the_work_are_raised(background: ThreadBackground) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await background.run(fail())


async def test_discovery_in_the_background(background: ThreadBackground) -> None:
    discovery = await open_discovery(background, "background")
    await discovery.put("/a/1", b"one")
    async with discovery.watch("/a/") as changes:
        assert await anext(changes) == [RecordChange("/a/1", b"one")]
        await discovery.put("/a/2", b"two")
        assert await anext(changes) == [RecordChange("/a/2", b"two")]
        await discovery.delete("/a/1")
        assert await anext(changes) == [RecordChange("/a/1", None)]
    assert await discovery.get("/a/") == {"/a/2": b"two"}
    await discovery.close()


async def test_a_lost_lease_is_reported_on_the_primary_loop_and_records_return(
    background: ThreadBackground,
) -> None:
    discovery = await open_discovery(background, "lost")
    lost = asyncio.Event()
    threads: list[int] = []
    discovery.on_lease_lost(lambda: (threads.append(threading.get_ident()), lost.set()))
    await discovery.put("/a/1", b"one")
    inner = discovery._inner._inner  # type: ignore[attr-defined]

    async def lose() -> None:
        inner.lose_lease()

    await background.run(lose())
    await lost.wait()
    assert threads == [threading.get_ident()]
    async with discovery.watch("/a/") as changes:
        seen = list(await anext(changes))
        while RecordChange("/a/1", b"one") not in seen:
            seen += await anext(changes)
    await discovery.close()


async def test_a_watch_that_fails_in_the_background_raises_on_the_primary_loop(
    background: ThreadBackground,
) -> None:
    discovery = await open_discovery(background, "failing")

    class Broken(MemoryDiscovery):
        def watch(self, prefix: str):  # type: ignore[no-untyped-def]
            raise ConnectionError("away")

    discovery._inner._inner = Broken("failing")  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        async with discovery.watch("/") as changes:
            await anext(changes)
    await discovery.close()


@pytest.mark.filterwarnings("error")
async def test_work_after_the_end_is_refused_and_closed() -> None:
    background = ThreadBackground()
    await background.close()
    work = asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="background loop is closed"):
        background.submit(work)

    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


class CountingDiscovery(MemoryDiscovery):
    """Counts the open watches, and fails them on request."""

    watches = 0

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        self.watches += 1
        try:
            async with super().watch(prefix) as changes:
                yield self._changes(changes)
        finally:
            self.watches -= 1

    async def _changes(self, changes: RecordWatch) -> AsyncIterator[Sequence[RecordChange]]:
        async for batch in changes:
            if any(change.key == "/a/error" for change in batch):
                raise PlaneUnavailable("gone")
            yield batch


async def test_watches_of_a_prefix_share_one_of_the_plane() -> None:
    inner = await CountingDiscovery.open("memory:shared")
    discovery = RepublishingDiscovery(inner)
    await discovery.put("/a/1", b"x")
    async with discovery.watch("/a/") as first:
        assert await anext(first) == [RecordChange("/a/1", b"x")]
        await discovery.put("/a/2", b"y")
        assert await anext(first) == [RecordChange("/a/2", b"y")]
        async with discovery.watch("/a/") as second, discovery.watch("/b/") as other:
            assert await anext(other) == []
            assert inner.watches == 2
            assert await anext(second) == [RecordChange("/a/1", b"x"), RecordChange("/a/2", b"y")]
            await discovery.delete("/a/1")
            assert await anext(first) == await anext(second) == [RecordChange("/a/1", None)]
        await asyncio.sleep(0.01)
        assert inner.watches == 1
        await discovery.put("/a/3", b"z")
        assert await anext(first) == [RecordChange("/a/3", b"z")]
    await discovery.close()
    assert inner.watches == 0


async def test_an_error_of_a_watch_reaches_all_and_the_next_watch_is_a_new_one() -> None:
    inner = await CountingDiscovery.open("memory:failing")
    discovery = RepublishingDiscovery(inner)
    async with discovery.watch("/a/") as first, discovery.watch("/a/") as second:
        assert await anext(first) == await anext(second) == []
        await discovery.put("/a/error", b"")
        for changes in (first, second):
            with pytest.raises(PlaneUnavailable):
                await anext(changes)
        await discovery.delete("/a/error")
        async with discovery.watch("/a/") as third:
            assert await anext(third) == []
    await discovery.close()
