"""Conformance tests for every discovery backend."""
# ruff: noqa: S101

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dynamo.communication.directory import RecordWatch
from dynamo.communication.discovery import Discovery

JoinDiscovery = Callable[[], Awaitable[Discovery]]


async def read_until(
    changes: RecordWatch, key: str, value: bytes | None
) -> list[tuple[str, bytes | None]]:
    """Read changes up to and including that of `key` to `value`."""
    seen: list[tuple[str, bytes | None]] = []
    async with asyncio.timeout(10):
        async for batch in changes:
            seen += [(change.key, change.value) for change in batch]
            if (key, value) in seen:
                return seen
    raise AssertionError("the watch ended")


class DiscoveryConformance:
    """Tests of a discovery backend. The fixture `join` opens one more plane."""

    async def test_record_is_visible_to_all_members(self, join: JoinDiscovery) -> None:
        owner, reader = await join(), await join()
        await owner.put("/ns/workers/a", b"1")
        for plane in (owner, reader):
            assert dict(await plane.get("/ns/")) == {"/ns/workers/a": b"1"}
        assert not await reader.get("/elsewhere/")

    async def test_put_replaces_and_delete_of_nothing_is_no_error(
        self, join: JoinDiscovery
    ) -> None:
        owner = await join()
        await owner.put("/k", b"1")
        await owner.put("/k", b"2")
        assert dict(await owner.get("/")) == {"/k": b"2"}
        await owner.delete("/k")
        await owner.delete("/k")
        assert not await owner.get("/")

    async def test_unusual_keys_and_values_are_kept(self, join: JoinDiscovery) -> None:
        owner, reader = await join(), await join()
        records = {
            "/a b/%2F/ü/..": b"",
            "/" + "long/" * 100: bytes(range(256)) * 400,
            "//": b"two\nlines\n",
        }
        for key, value in records.items():
            await owner.put(key, value)
        assert dict(await reader.get("/")) == records

    async def test_a_watch_begins_with_the_present_state(self, join: JoinDiscovery) -> None:
        owner, reader = await join(), await join()
        await owner.put("/w/1", b"1")
        await owner.put("/x/1", b"no")
        async with reader.watch("/w/") as changes:
            first = await anext(changes)
            assert [(change.key, change.value) for change in first] == [("/w/1", b"1")]

    async def test_watch_of_empty_prefix_starts_with_empty_batch(self, join: JoinDiscovery) -> None:
        async with (await join()).watch("/w/") as changes:
            assert list(await anext(changes)) == []

    async def test_watch_delivers_changes_in_order(self, join: JoinDiscovery) -> None:
        owner, reader = await join(), await join()
        async with reader.watch("/w/") as changes:
            await anext(changes)
            for number in range(30):
                await owner.put("/w/counter", b"%d" % number)
                await owner.put(f"/x/{number}", b"not watched")
            seen = await read_until(changes, "/w/counter", b"29")
            values = [int(value or b"-1") for _, value in seen]
            assert values == sorted(values)
            assert {key for key, _ in seen} == {"/w/counter"}
            await owner.delete("/w/counter")
            await read_until(changes, "/w/counter", None)

    async def test_closing_deletes_own_records_only(self, join: JoinDiscovery) -> None:
        owner, reader, watcher = await join(), await join(), await join()
        await owner.put("/w/one", b"1")
        await reader.put("/w/other", b"2")
        async with watcher.watch("/w/") as changes:
            await anext(changes)
            await owner.close()
            await read_until(changes, "/w/one", None)
        assert dict(await watcher.get("/w/")) == {"/w/other": b"2"}

    async def test_watches_are_independent(self, join: JoinDiscovery) -> None:
        owner = await join()
        async with owner.watch("/a/") as first, owner.watch("/") as second:
            await anext(first)
            await anext(second)
            await owner.put("/b/1", b"b")
            await owner.put("/a/1", b"a")
            assert await read_until(first, "/a/1", b"a") == [("/a/1", b"a")]
            assert ("/b/1", b"b") in await read_until(second, "/a/1", b"a")

    async def test_delete_of_foreign_record_does_nothing(self, join: JoinDiscovery) -> None:
        owner, reader = await join(), await join()
        await owner.put("/k", b"1")
        await reader.delete("/k")
        assert dict(await reader.get("/")) == {"/k": b"1"}
