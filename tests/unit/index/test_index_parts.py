"""Eviction, worker bits, snapshots, packed hashes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.index.conftest import ManualClock, chain

from dynamo.core.errors import ConfigError
from dynamo.core.hashing import pack_hashes, unpack_hashes
from dynamo.scheduling.index.kv_index import KvIndex
from dynamo.scheduling.index.worker_bitsets import WorkerBitsets
from dynamo.services.index_file import IndexFile, encode_snapshot, restore_snapshot

CHAINS = [chain(number, 30) for number in range(100, 400)]
STEM, FIRST, SECOND = chain(0, 20), chain(1, 10), chain(2, 10)


def test_least_recently_used_branches_are_evicted_before_shared_prefixes() -> None:
    index = KvIndex(12_000)
    stem = chain(0, 100)
    index.store("a", 0, stem)
    branches = [chain(number, 100) for number in range(1, 5)]
    for branch in branches:
        index.store("a", stem[-1], branch)
    index.match(stem + branches[0])
    for number in range(5, 10):
        index.store("a", stem[-1], chain(number, 100))
    assert index.evicted_blocks
    assert index.bytes_used <= index.budget_bytes
    assert index.match(stem + branches[0]) == {"a": 200}, "recently used"
    assert index.match(stem + branches[1]) == {"a": 100}, (
        "least recently used, but the shared beginning stays"
    )


def test_removed_workers_leave_nothing_behind() -> None:
    index = KvIndex()
    for number in range(40):
        worker = f"w{number}"
        for name in range(20):
            index.store(worker, 0, chain(number * 100 + name, 50))
        index.remove_worker(worker)
    assert index.match(chain(0, 50)) == {}
    for _ in range(400):
        index.remove("unknown", ())
    assert index.block_count == index.bytes_used == 0


def test_bits_of_removed_workers_are_recycled() -> None:
    sets = WorkerBitsets()
    first, second = sets.get_or_assign_bit("a"), sets.get_or_assign_bit("b")
    assert sets.remove("a") == first
    assert sets.get_or_assign_bit("c") not in (first, second)
    sets.recycle_bits(first)
    assert sets.get_or_assign_bit("d") == first
    assert sets.get_bit("a") == 0
    assert sets.list_members(first | second) == ["d", "b"]


def test_a_cyclic_chain_does_no_harm() -> None:
    index = KvIndex(2_400)
    index.store("a", 5, [5])
    index.store("a", 5, [5, 6, 5, 6])
    for number in range(20):
        index.store("a", 5, chain(number, 10))
    assert index.bytes_used <= index.budget_bytes


@pytest.fixture
def known() -> KvIndex:
    index = KvIndex()
    index.store("a", 0, STEM + FIRST)
    index.store("b", 0, STEM + SECOND)
    index.store("b", 0, (STEM + FIRST)[:25])
    return index


async def test_saved_and_restored(tmp_path: Path, clock: ManualClock, known: KvIndex) -> None:
    again = KvIndex()
    path = tmp_path / "folder" / "index.bin"
    file = IndexFile(str(path), 16, clock)
    assert await file.restore(again) == 0
    await file.save(known)
    assert await file.restore(again) == 40
    for prompt in (STEM + FIRST, STEM + SECOND):
        assert again.match(prompt) == known.match(prompt)
    assert [entry.name for entry in path.parent.iterdir()] == ["index.bin"]
    with pytest.raises(ConfigError, match="16 tokens"):
        await IndexFile(str(path), 32, clock).restore(again)


class BusyClock(ManualClock):
    """A clock that changes the index between the steps of a snapshot."""

    def __init__(self, index: KvIndex) -> None:
        super().__init__()
        self.index = index
        self.turns = 0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    async def offload(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.turns += 1
        self.index.remove("a", CHAINS[self.turns % 300][::-1])
        self.index.store("b", 0, chain(1_000 + self.turns, 30))
        return work(*args, **kwargs)


async def test_a_snapshot_is_consistent(tmp_path: Path, clock: ManualClock) -> None:
    index, again = KvIndex(), KvIndex()
    for blocks in CHAINS:
        index.store("a", 0, blocks)
    busy = BusyClock(index)
    path = str(tmp_path / "index.bin")
    await IndexFile(path, 16, busy).save(index)
    assert busy.turns > 5
    await IndexFile(path, 16, clock).restore(again)
    overlaps = [sum(again.match(blocks).values()) for blocks in CHAINS]
    assert overlaps.count(30) >= 298, "one was removed before the copy began"
    assert set(again.workers) <= {"a", "b"}
    assert sum(again.match(chain(1_005, 30)).values()) == 0, "stored after it began"


@pytest.mark.parametrize("broken", [b"", b"?", b"\x01\0\0\0\x90", b"\x09\0\0\0\x92"])
def test_other_data_is_refused(broken: bytes) -> None:
    with pytest.raises(ConfigError, match="not a saved index"):
        list(restore_snapshot(KvIndex(), broken, 16))


def test_a_truncated_snapshot_is_refused(known: KvIndex) -> None:
    packed = b"".join(encode_snapshot(known, 16))
    with pytest.raises(ConfigError, match="last frame is incomplete"):
        list(restore_snapshot(KvIndex(), packed[:-3], 16))


async def test_restore_errors_name_the_file(tmp_path: Path, clock: ManualClock) -> None:
    garbage, closed = tmp_path / "garbage.bin", tmp_path / "loop.bin"
    garbage.write_bytes(b"\x09\0\0\0\x92")
    closed.symlink_to(closed)
    for path, wrong in ((garbage, "not a saved"), (tmp_path, "folder"), (closed, "cannot be read")):
        with pytest.raises(ConfigError, match=wrong) as caught:
            await IndexFile(str(path), 16, clock).restore(KvIndex())
        assert "index.file" in caught.value.message
        assert str(path) in caught.value.message
        assert caught.value.hint
    assert await IndexFile(str(tmp_path / "new.bin"), 16, clock).restore(KvIndex()) == 0


async def test_a_failed_save_keeps_the_old_file(
    tmp_path: Path, clock: ManualClock, known: KvIndex
) -> None:
    path = tmp_path / "index.bin"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        await IndexFile(str(path), 16, clock).save(known)
    assert list(tmp_path.iterdir()) == [path]


def test_hashes_are_packed_and_unpacked() -> None:
    hashes = chain(1, 5)
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    with pytest.raises(ValueError):
        unpack_hashes(b"1234")
