"""Tests of folder discovery alone: bad entries, lost leases, changes within one clock tick."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.communication.discovery.file import FileDiscovery
from dynamo.communication.discovery.folder import FolderLease, FolderReader, record_file_name
from dynamo.communication.discovery.folder_poller import FolderEvents
from dynamo.core.errors import ConfigError
from dynamo_conformance.discovery import read_until


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FileDiscovery]:
    plane = await FileDiscovery.open(f"file:{tmp_path / 'records'}")
    yield plane
    await plane.close()


async def test_the_folder_must_be_private_to_the_user(plane: FileDiscovery, tmp_path: Path) -> None:
    assert (tmp_path / "records").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)  # shared by all, as /tmp is
    with pytest.raises(ConfigError, match="other users can write"):
        await FileDiscovery.open(f"file:{tmp_path / 'open'}")
    with pytest.raises(ConfigError):
        await FileDiscovery.open("file:")


async def test_bad_entries_are_skipped_with_one_warning(
    plane: FileDiscovery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await plane.put("/good", b"1")
    (lease,) = (path for path in (tmp_path / "records").iterdir() if path.is_dir())
    (lease / ("0" * 32)).write_bytes(b"/key of another name\nvalue")
    (lease / ("1" * 32)).write_bytes(b"no line break")
    (lease / ("2" * 32)).mkdir()
    (lease / ("3" * 32)).symlink_to("/etc/passwd")
    (lease / ("4" * 32)).write_bytes(b"\xff\xfe\n")
    (lease / "notes.txt").write_bytes(b"not ours")
    reader = FolderReader(tmp_path / "records")
    assert await asyncio.to_thread(reader.poll) == {"/good": b"1"}
    (lease / record_file_name("/new")).write_bytes(b"/new\n2")
    assert await asyncio.to_thread(reader.poll) == {"/good": b"1", "/new": b"2"}
    reader.close()
    assert caplog.text.count("bad discovery entry skipped") == 5
    for name in "012345":
        path = lease / (name * 32)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()


async def test_other_folders_are_not_deleted(plane: FileDiscovery, tmp_path: Path) -> None:
    for name in ("photos", "0123456789abcdef"):
        (tmp_path / "records" / name).mkdir()
        (tmp_path / "records" / name / ("a" * 32)).write_bytes(b"mine")
    assert dict(await plane.get("/")) == {}
    assert (tmp_path / "records" / "photos" / ("a" * 32)).exists()
    assert (tmp_path / "records" / "0123456789abcdef" / ("a" * 32)).exists()


async def test_a_lost_lease_is_reported_and_replaced(plane: FileDiscovery, tmp_path: Path) -> None:
    lost = asyncio.Event()
    plane.on_lease_lost(lost.set)
    await plane.put("/k", b"1")
    async with plane.watch("/") as changes:
        await read_until(changes, "/k", b"1")
        (lease,) = (path for path in (tmp_path / "records").iterdir() if path.is_dir())
        for path in lease.iterdir():
            path.unlink()
        lease.rmdir()
        await read_until(changes, "/k", None)
        await lost.wait()
        await plane.put("/k", b"2")
        await read_until(changes, "/k", b"2")


async def test_putting_the_same_value_is_no_change(plane: FileDiscovery) -> None:
    async with plane.watch("/") as changes:
        await anext(changes)
        await plane.put("/k", b"1")
        seen = await read_until(changes, "/k", b"1")
        await plane.put("/k", b"1")
        await plane.put("/end", b"")
        seen += await read_until(changes, "/end", b"")
    assert seen == [("/k", b"1"), ("/end", b"")]


def test_changes_within_one_tick_of_the_clock_are_seen(tmp_path: Path) -> None:
    lease, reader = FolderLease(tmp_path), FolderReader(tmp_path)
    for number in range(300):
        lease.put("/k", b"%03d" % number)
        assert reader.poll() == {"/k": b"%03d" % number}
    assert reader.poll() is None
    reader.close()
    lease.close()
    assert list(tmp_path.iterdir()) == []


def test_events_tell_changes_and_the_death_of_a_process(tmp_path: Path) -> None:
    events = FolderEvents()
    events.watch(tmp_path)
    assert not events.read()
    with (tmp_path / "lock").open("w"):  # as the lock of a process, which dies
        events.wait(60.0, woken_only=False)
        assert events.read()
        assert not events.read()
    events.wait(60.0, woken_only=False)
    assert events.read()
    events.wake()
    events.wait(60.0, woken_only=True)
    events.watch(tmp_path / "missing")
    assert not events.read()
    events.watch(tmp_path / "lock" / "no folder")  # as where the kernel watches no more folders
    assert events.read()
    assert events.read()
    events.close()
    events.wake()


async def test_a_folder_without_events_is_polled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FolderEvents, "read", lambda _: True)
    monkeypatch.setattr(FolderEvents, "watch", lambda *_: None)
    planes = [await FileDiscovery.open(f"file:{tmp_path / 'records'}") for _ in range(2)]
    async with planes[0].watch("/") as changes:
        await planes[1].put("/k", b"1")
        await read_until(changes, "/k", b"1")
    for plane in planes:
        await plane.close()
