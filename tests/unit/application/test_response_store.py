"""The store of responses: bounds, owners, several processes, and files that cannot be used."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.application.responses import store as store_module
from dynamo.application.responses.store import (
    FILE_NAME,
    LOST_AFTER_S,
    ResponseStore,
    StreamEvents,
    StreamPart,
)
from dynamo.core.errors import (
    InvalidRequest,
    NotFound,
    PreviousResponseNotFound,
    StoreUnavailable,
    TooLarge,
    Unsupported,
)
from dynamo.core.settings.schema import ResponsesSettings

KEEP_S = 1000.0


class WallTime:
    """A time that the test sets."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> WallTime:
    return WallTime()


Open = Callable[..., ResponseStore]


@pytest.fixture
async def open_store(tmp_path: Path, wall: WallTime) -> AsyncIterator[Open]:
    """`open_store(max_bytes=...)` opens the file of this test, as one process of several."""
    stores = []

    def open_file(max_bytes: int = 1 << 20) -> ResponseStore:
        settings = ResponsesSettings(keep=KEEP_S, max_bytes=max_bytes)
        store = ResponseStore(lambda: tmp_path / FILE_NAME, settings, wall)
        stores.append(store)
        return store

    yield open_file
    for store in stores:
        await store.close()


def response(name: str, previous: str | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "status": "completed",
        "background": False,
        "previous_response_id": previous,
        "output": [{"id": f"msg_{name}_o0", "text": f"answer {name}"}],
        **fields,
    }


def items(name: str, text: str = "") -> list[dict[str, Any]]:
    return [{"id": f"msg_{name}_i0", "text": text or f"question {name}"}]


async def test_an_unused_store_has_no_thread_and_no_file(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    assert store._thread is None
    await store.close()
    assert not list(tmp_path.iterdir())


async def test_a_conversation_goes_on_in_another_process(open_store: Open, tmp_path: Path) -> None:
    first, second = open_store(), open_store()
    await first.add("ann", response("1"), items("1"))
    await second.add("ann", response("2", "resp_1"), items("2"))
    context = await first.load_context("ann", "resp_2")
    ids = ["msg_1_i0", "msg_1_o0", "msg_2_i0", "msg_2_o0"]
    assert [item["id"] for item in context] == ids
    page = await first.load_page("ann", "resp_2", ascending=True, limit=9, after=None)
    assert page.ids == ids[:-1]
    assert await first.find_items("ann", {"msg_2_o0", "msg_3_o0", "x"}) == {"msg_2_o0": context[-1]}
    await first.close()
    assert (await open_store().get("ann", "resp_1"))["output"] == [context[1]]
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


async def test_each_owner_has_responses_of_its_own(open_store: Open) -> None:
    store = open_store()
    await store.add("ann", response("1"), items("1"))
    for refused in (
        store.get("bob", "resp_1"),
        store.delete("bob", "resp_1"),
        store.cancel("bob", "resp_1"),
        store.load_page("bob", "resp_1", ascending=True, limit=1, after=None),
    ):
        with pytest.raises(NotFound):
            await refused
    with pytest.raises(PreviousResponseNotFound):
        await store.load_context("bob", "resp_1")
    assert await store.find_items("bob", {"msg_1_o0"}) == {}
    assert await store.get("ann", "resp_1")


async def test_a_response_expires_after_its_last_use(open_store: Open, wall: WallTime) -> None:
    store = open_store()
    for name in ("1", "2"):
        await store.add("ann", response(name), items(name))
    wall.now += KEEP_S - 1
    await store.load_context("ann", "resp_1")
    wall.now += KEEP_S - 1
    assert await store.get("ann", "resp_1")
    with pytest.raises(NotFound):
        await store.get("ann", "resp_2")
    with pytest.raises(PreviousResponseNotFound):
        await store.load_context("ann", "resp_2")


async def test_the_responses_unused_longest_are_deleted_beyond_the_bound(
    open_store: Open, wall: WallTime, monkeypatch: Any
) -> None:
    monkeypatch.setattr(store_module, "PRUNE_AFTER_WRITES", 1)
    store = open_store(max_bytes=1 << 20)
    for number in range(5):
        wall.now += 1
        await store.add("ann", response(str(number)), items(str(number), "x" * (300 << 10)))
        if number == 2:
            await store.load_context("ann", "resp_0")
    stored = []
    for number in range(5):
        try:
            await store.get("ann", f"resp_{number}")
            stored.append(number)
        except NotFound:
            pass
    assert stored == [0, 3, 4]


async def test_a_conversation_has_a_largest_size(open_store: Open, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module, "MAX_CONTEXT_BYTES", 500)
    store = open_store()
    await store.add("ann", response("1"), items("1", "x" * 300))
    await store.add("ann", response("2", "resp_1"), items("2"))
    assert await store.load_context("ann", "resp_1")
    with pytest.raises(TooLarge, match="500"):
        await store.load_context("ann", "resp_2")


def running(name: str) -> dict[str, Any]:
    return response(name, status="in_progress", background=True, output=[])


async def test_a_running_response_is_cancelled_by_another_process(open_store: Open) -> None:
    store, other = open_store(), open_store()
    for name in ("1", "2"):
        await store.add("ann", running(name), items(name), running=True)
    assert (await other.cancel("ann", "resp_1"))["status"] == "cancelled"
    assert await store.renew(["resp_1", "resp_2"]) == {"resp_2"}
    for name in ("1", "2"):
        await store.finish(response(name, background=True))
    assert (await other.get("ann", "resp_1"))["status"] == "cancelled"
    assert (await other.cancel("ann", "resp_2"))["status"] == "completed"


async def test_a_running_response_fails_when_its_process_has_ended(
    open_store: Open, wall: WallTime
) -> None:
    store = open_store()
    await store.add("ann", running("1"), items("1"), running=True)
    wall.now += LOST_AFTER_S
    assert await store.renew(["resp_1"])
    assert (await store.get("ann", "resp_1"))["status"] == "in_progress"
    with pytest.raises(InvalidRequest, match="in progress"):
        await store.load_context("ann", "resp_1")
    wall.now += LOST_AFTER_S + 1
    stored = await store.get("ann", "resp_1")
    assert (stored["status"], stored["error"]["code"]) == ("failed", "server_error")


def events(first: int, last: int) -> StreamEvents:
    data = b"".join(b"event: x\ndata: %d\n\n" % number for number in range(first, last + 1))
    return StreamEvents(last, data)


async def test_another_process_reads_the_events_of_a_stream(
    open_store: Open, tmp_path: Path
) -> None:
    store, other = open_store(), open_store()
    await store.add("ann", running("1"), items("1"), running=True, events=events(0, 1))
    part = await other.read_stream("ann", "resp_1", -1)
    assert part == StreamPart(1, events(0, 1).data, "running")
    await store.renew(["resp_1"], [("resp_1", events(2, 4)), ("resp_2", events(0, 1))])
    assert await other.read_stream("ann", "resp_1", 2) == StreamPart(
        4, events(3, 4).data, "running"
    )
    last = StreamEvents(5, b"event: response.completed\ndata: 5\n\n")
    await store.finish(response("1"), last)
    assert await other.read_stream("ann", "resp_1", 4) == StreamPart(5, last.data, "ended")
    assert await other.read_stream("ann", "resp_1", 5) == StreamPart(5, b"", "ended")
    with pytest.raises(NotFound):
        await other.read_stream("bob", "resp_1", -1)
    await other.delete("ann", "resp_1")
    await store.renew(["resp_1"], [("resp_1", events(6, 7))])
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        assert file.execute("SELECT count(*) FROM events").fetchone() == (0,)


async def test_a_long_stream_is_read_in_parts(open_store: Open, monkeypatch: Any) -> None:
    store = open_store()
    await store.add("ann", running("1"), items("1"), running=True, events=events(0, 1))
    size = len(events(0, 1).data)
    for number in range(2, 40, 2):
        await store.renew(["resp_1"], [("resp_1", events(number, number + 1))])
    monkeypatch.setattr(store_module, "MAX_PART_BYTES", 3 * size)
    part, data = await store.read_stream("ann", "resp_1", -1), b""
    while part.stage == "stored":
        data += part.data
        part = await store.read_stream("ann", "resp_1", part.last)
    assert (data + part.data, part.stage) == (events(0, 39).data, "running")


async def test_a_stream_has_an_end_when_its_process_has_ended(
    open_store: Open, wall: WallTime
) -> None:
    store = open_store()
    await store.add("ann", running("1"), items("1"), running=True, events=events(0, 1))
    wall.now += LOST_AFTER_S + 1
    part = await store.read_stream("ann", "resp_1", 1)
    assert part.stage == "ended"
    assert part.data.startswith(b"event: response.failed\ndata: {")
    assert b'"sequence_number":2' in part.data
    assert (await store.read_stream("ann", "resp_1", 2)).data == b""


async def test_events_that_are_missing_are_an_error(open_store: Open) -> None:
    store = open_store()
    await store.add("ann", running("1"), items("1"), running=True, events=events(0, 1))
    await store.renew(["resp_1"], [("resp_1", events(4, 5))])
    with pytest.raises(StoreUnavailable, match="2 to 3"):
        await store.read_stream("ann", "resp_1", -1)
    assert (await store.read_stream("ann", "resp_1", 3)).data == events(4, 5).data
    await store.add("ann", running("2"), items("2"), running=True)
    with pytest.raises(Unsupported, match="stream: true"):
        await store.read_stream("ann", "resp_2", -1)


async def test_processes_write_at_the_same_time(open_store: Open) -> None:
    stores = [open_store() for _ in range(3)]

    async def write(store: ResponseStore, writer: int) -> None:
        for number in range(20):
            await store.add("ann", response(f"{writer}-{number}"), items("i"))

    async with asyncio.TaskGroup() as group:
        for writer, store in enumerate(stores):
            group.create_task(write(store, writer))
    for writer in range(3):
        assert await stores[0].get("ann", f"resp_{writer}-19")


async def test_a_file_that_cannot_be_used_is_an_error_until_it_is_mended(
    open_store: Open, tmp_path: Path
) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"no database" * 1000)
    store = open_store()
    with pytest.raises(StoreUnavailable, match="not a database"):
        await store.get("ann", "resp_1")
    path.unlink()
    await store.add("ann", response("1"), items("1"))
    assert await store.get("ann", "resp_1")


async def test_a_file_of_another_version_is_refused(open_store: Open, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as file:
        file.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreUnavailable, match="version"):
        await open_store().get("ann", "resp_1")


async def test_what_is_stored_is_what_was_sent(open_store: Open) -> None:
    store = open_store()
    sent = response("1", metadata={"k": "ü\u2028"}, temperature=0.7)
    await store.add("ann", sent, items("1"))
    assert msgspec.json.encode(await store.get("ann", "resp_1")) == msgspec.json.encode(sent)


async def test_processes_open_and_close_the_file_at_the_same_time(open_store: Open) -> None:
    async def use(number: int) -> None:
        store = open_store()
        await store.add("ann", response(str(number)), items(str(number)))
        await store.close()

    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(use(number))
    assert await open_store().get("ann", "resp_15")


@pytest.mark.parametrize("what", ["rows", "opening"])
async def test_calls_do_not_wait_in_turn_for_a_locked_file(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(store_module, "BUSY_TIMEOUT_S", 0.05)
    waits: list[str] = []
    first = open_store()
    await first.add("ann", response("0"), items("0"))
    store = first if what == "rows" else open_store()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other, ExitStack() as locks:
        other.execute("BEGIN EXCLUSIVE")
        if what == "opening":
            lock = locks.enter_context((tmp_path / FILE_NAME).with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        wall = store._wall

        def add() -> float:
            waits.append("add")
            return wall()

        monkeypatch.setattr(store, "_wall", add)
        calls = [store.add("ann", response(str(n)), items("1")) for n in range(1, 9)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, StoreUnavailable) for error in errors)
        assert len(waits) <= 1
        other.rollback()
    monkeypatch.setattr(store, "_wall", wall)
    monkeypatch.setattr(store, "_locked_until_s", 0.0)
    await store.add("ann", response("9"), items("9"))
    assert (await store.get("ann", "resp_9"))["output"]


async def test_a_page_reads_no_more_responses_than_it_needs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for number in range(1, 6):
        previous = f"resp_{number - 1}" if number > 1 else None
        await store.add("ann", response(str(number), previous), items(str(number)))
    reads: list[str] = []
    read = store._read

    def count(owner: str, response_id: str) -> Any:
        reads.append(response_id)
        return read(owner, response_id)

    monkeypatch.setattr(store, "_read", count)
    page = await store.load_page("ann", "resp_5", ascending=False, limit=1, after=None)
    assert (page.ids, page.has_more, reads) == (["msg_5_i0"], True, ["resp_5", "resp_4"])
    page = await store.load_page("ann", "resp_5", ascending=False, limit=2, after="msg_4_i0")
    assert page.ids == ["msg_3_o0", "msg_3_i0"]
    page = await store.load_page("ann", "resp_5", ascending=True, limit=3, after=None)
    assert page.ids == ["msg_1_i0", "msg_1_o0", "msg_2_i0"]
    page = await store.load_page("ann", "resp_5", ascending=True, limit=9, after="msg_4_i0")
    assert (page.ids, page.has_more) == (["msg_4_o0", "msg_5_i0"], False)
    with pytest.raises(InvalidRequest, match="no item"):
        await store.load_page("ann", "resp_5", ascending=True, limit=9, after="msg_5_o0")
