"""What every discovery backend promises."""
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
    """Read changes up to (and with) that of `key` to `value`."""
    seen: list[tuple[str, bytes | None]] = []
    async with asyncio.timeout(10):
        async for batch in changes:
            seen += [(change.key, change.value) for change in batch]
            if (key, value) in seen:
                return seen
    raise AssertionError("the watch ended")


class DiscoveryConformance:
    """Fixture: `join`."""

    async def test_record_is_visible_to_all_members(self, join: JoinDiscovery) -> None:
        one, other = await join(), await join()
        await one.put("/ns/workers/a", b"1")
        assert (
            dict(await one.get("/ns/")) == dict(await other.get("/ns/")) == {"/ns/workers/a": b"1"}
        )
        assert not await other.get("/elsewhere/")

    async def test_put_replaces_and_delete_of_nothing_is_no_error(
        self, join: JoinDiscovery
    ) -> None:
        one = await join()
        await one.put("/k", b"1")
        await one.put("/k", b"2")
        assert dict(await one.get("/")) == {"/k": b"2"}
        await one.delete("/k")
        await one.delete("/k")
        assert not await one.get("/")

    async def test_unusual_keys_and_values_are_kept(self, join: JoinDiscovery) -> None:
        one, other = await join(), await join()
        records = {
            "/a b/%2F/ü/..": b"",
            "/" + "long/" * 100: bytes(range(256)) * 400,
            "//": b"two\nlines\n",
        }
        for key, value in records.items():
            await one.put(key, value)
        assert dict(await other.get("/")) == records

    async def test_a_watch_begins_with_the_present_state(self, join: JoinDiscovery) -> None:
        one, other = await join(), await join()
        await one.put("/w/1", b"1")
        await one.put("/x/1", b"no")
        async with other.watch("/w/") as changes:
            first = await anext(changes)
            assert [(change.key, change.value) for change in first] == [("/w/1", b"1")]

    async def test_watch_of_empty_prefix_starts_with_empty_batch(self, join: JoinDiscovery) -> None:
        async with (await join()).watch("/w/") as changes:
            assert list(await anext(changes)) == []

    async def test_watch_delivers_changes_in_order(self, join: JoinDiscovery) -> None:
        one, other = await join(), await join()
        async with other.watch("/w/") as changes:
            await anext(changes)
            for number in range(30):
                await one.put("/w/counter", b"%d" % number)
                await one.put(f"/x/{number}", b"not watched")
            seen = await read_until(changes, "/w/counter", b"29")
            values = [int(value or b"-1") for _, value in seen]
            assert values == sorted(values)
            assert {key for key, _ in seen} == {"/w/counter"}
            await one.delete("/w/counter")
            await read_until(changes, "/w/counter", None)

    async def test_closing_deletes_own_records_only(self, join: JoinDiscovery) -> None:
        one, other, watcher = await join(), await join(), await join()
        await one.put("/w/one", b"1")
        await other.put("/w/other", b"2")
        async with watcher.watch("/w/") as changes:
            await anext(changes)
            await one.close()
            await read_until(changes, "/w/one", None)
        assert dict(await watcher.get("/w/")) == {"/w/other": b"2"}

    async def test_watches_are_independent(self, join: JoinDiscovery) -> None:
        one = await join()
        async with one.watch("/a/") as first, one.watch("/") as second:
            await anext(first)
            await anext(second)
            await one.put("/b/1", b"b")
            await one.put("/a/1", b"a")
            assert await read_until(first, "/a/1", b"a") == [("/a/1", b"a")]
            assert ("/b/1", b"b") in await read_until(second, "/a/1", b"a")

    async def test_delete_of_foreign_record_does_nothing(self, join: JoinDiscovery) -> None:
        one, other = await join(), await join()
        await one.put("/k", b"1")
        await other.delete("/k")
        assert dict(await other.get("/")) == {"/k": b"1"}
