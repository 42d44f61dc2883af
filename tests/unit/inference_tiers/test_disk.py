"""`DiskTier`: blocks on a disk are loaded as they were stored, also after a restart."""

from __future__ import annotations

import asyncio
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inference_tiers.blocks import (
    ManualClock,
    Memory,
    OpenDisk,
    count_held,
    held_blocks,
    load,
)

from dynamo.inference.tiers.codecs import open_codec
from dynamo.inference.tiers.disk_part import DiskPart
from dynamo.inference.tiers.slot_file import SlotFile
from dynamo_conformance.transfer import read_slot, write_slot


@pytest.mark.parametrize("block_bytes", [64, 8192, 10_000])
async def test_blocks_are_loaded_as_they_were_stored(open_tier: OpenDisk, block_bytes: int) -> None:
    memory = Memory(block_bytes=block_bytes)
    tier = await open_tier(memory)
    chain = memory.chain("a", 20)

    assert await tier.store(memory.outgoing(chain)) == 20
    assert await tier.store(memory.outgoing(chain)) == 0, "stored twice"

    assert tier.blocks == tier.counters.stored_blocks == 20
    assert count_held(tier, [*chain.hashes, 1]) == 20
    assert await load(tier, memory, chain) == 20
    assert await load(tier, memory, chain, first=7) == 13
    assert held_blocks(tier.take_events(), "disk") == set(chain.hashes)
    assert tier.counters.loaded_blocks == 33
    assert tier.predict_load_s(10) > tier.predict_load_s(1) > 0


async def test_a_restart_is_warm_and_announces_its_blocks(open_tier: OpenDisk) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain, other = memory.chain("a", 5), memory.chain("b", 3)
    await tier.store(memory.outgoing(chain, 3))
    await tier.store(memory.outgoing(chain, 0, 3))
    await tier.store(memory.outgoing(other))
    await tier.close()

    tier = await open_tier(memory)

    assert tier.blocks == 8
    assert tier.take_events() == []
    events = tier.snapshot_events()
    assert held_blocks(events, "disk") == {*chain.hashes, *other.hashes}
    assert await load(tier, memory, chain) == 5
    assert await tier.store(memory.outgoing(memory.chain("c", 4))) == 4
    assert await load(tier, memory, other) == 3


async def test_chains_are_evicted_from_the_tail_of_the_one_used_longest_ago(
    open_tier: OpenDisk,
) -> None:
    memory = Memory()
    tier = await open_tier(memory, slots=8)
    old, new = memory.chain("old", 4), memory.chain("new", 4)
    await tier.store(memory.outgoing(new))
    await tier.store(memory.outgoing(old))
    assert await load(tier, memory, new, first=2) == 2  # its first blocks are on the device

    assert await tier.store(memory.outgoing(memory.chain("c", 3))) == 3

    assert (count_held(tier, old.hashes), count_held(tier, new.hashes)) == (1, 4)
    assert tier.counters.evicted_blocks == 3
    assert held_blocks(tier.take_events(), "disk") == held_blocks(tier.snapshot_events(), "disk")


async def test_a_slot_that_gets_another_owner_is_not_stored(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 2)
    blocks = memory.outgoing(chain)
    memory.region.generations[blocks[0].slot] += 1
    write = SlotFile.write

    def write_and_reuse(file: SlotFile, *arguments: Any) -> None:
        memory.region.generations[blocks[1].slot] += 1
        write(file, *arguments)

    monkeypatch.setattr(SlotFile, "write", write_and_reuse)

    assert await tier.store(blocks) == 0
    assert tier.blocks == 0
    monkeypatch.undo()
    assert await tier.store(memory.outgoing(chain)) == 2
    assert await load(tier, memory, chain) == 2


async def test_a_block_of_another_prompt_with_the_same_hash_is_not_loaded(
    open_tier: OpenDisk,
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain, forged = memory.chain("a", 3), memory.chain("b", 3)
    forged.hashes = chain.hashes
    await tier.store(memory.outgoing(chain))

    assert await load(tier, memory, forged) == 0

    assert tier.counters.corrupt_blocks == 1


async def test_two_workers_use_two_parts_of_a_folder(open_tier: OpenDisk, tmp_path: Path) -> None:
    memory = Memory()
    first, second = await open_tier(memory), await open_tier(memory)
    chain = memory.chain("a", 2)
    await first.store(memory.outgoing(chain))

    assert (first.blocks, second.blocks) == (2, 0)
    assert first.folder != second.folder
    await first.close()
    assert (await open_tier(memory)).folder == first.folder
    assert len(list((tmp_path / "kv").iterdir())) == 2


async def test_another_layout_has_another_folder(open_tier: OpenDisk) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 2)
    await tier.store(memory.outgoing(chain))
    await tier.close()

    other = await open_tier(memory, layout="another model")
    assert other.blocks == 0
    for name in ("blocks", "index"):  # files of another model at the place of its own
        (other.folder / name).write_bytes((tier.folder / name).read_bytes())
    await other.close()
    other = await open_tier(memory, layout="another model")
    await other._tasks.join()

    assert other.blocks == 0
    assert await other.store(memory.outgoing(chain)) == 2


async def test_files_are_private(open_tier: OpenDisk, tmp_path: Path) -> None:
    memory = Memory()
    tier = await open_tier(memory)

    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE(tier.folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tier.folder.iterdir()}
    assert modes == {0o600}


async def test_a_cleared_tier_stays_empty_after_a_restart(open_tier: OpenDisk) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 4)
    await tier.store(memory.outgoing(chain))
    storing = asyncio.ensure_future(tier.store(memory.outgoing(memory.chain("b", 4))))
    await asyncio.sleep(0)

    assert {*tier.clear()} == {*chain.hashes}
    await storing

    assert tier.blocks == 0
    assert held_blocks(tier.take_events(), "disk") == {*chain.hashes}, "events of b"
    await tier.close()
    tier = await open_tier(memory)
    assert not count_held(tier, chain.hashes)
    assert await tier.store(memory.outgoing(chain)) == 4


async def test_a_lost_index_is_rebuilt_in_the_background(open_tier: OpenDisk) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 6)
    await tier.store(memory.outgoing(chain))
    await tier.close()
    (tier.folder / "index").unlink()

    tier = await open_tier(memory)
    assert tier.blocks == 0
    await tier._tasks.join()

    assert held_blocks(tier.take_events(), "disk") == set(chain.hashes)
    assert await load(tier, memory, chain) == 6
    assert await tier.store(memory.outgoing(memory.chain("b", 30))) == 30
    await tier.close()
    tier = await open_tier(memory)
    assert tier.blocks == 32


async def test_a_scan_ends_with_the_file(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotFile, "reserve", lambda *_: None)  # the file system cannot do it
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 6)
    await tier.store(memory.outgoing(chain))
    await tier.close()
    (tier.folder / "index").unlink()

    tier = await open_tier(memory)
    await tier._tasks.join()

    assert await load(tier, memory, chain) == 6


async def test_a_slot_that_is_read_while_a_scan_ends_is_free_once(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.inference.tiers.disk.SCANNED_AT_ONCE", 8)
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 6)
    await tier.store(memory.outgoing(chain))
    await tier.close()
    (tier.folder / "index").unlink()
    go_on, read, scan = threading.Event(), SlotFile.read, DiskPart.scan

    def slow_read(file: SlotFile, *arguments: Any) -> bytes:
        go_on.wait(10)
        return read(file, *arguments)

    def slow_scan(part: DiskPart, first: int, end: int) -> Any:
        if first:
            time.sleep(0.05)
        return scan(part, first, end)

    monkeypatch.setattr(SlotFile, "read", slow_read)
    monkeypatch.setattr(DiskPart, "scan", slow_scan)
    tier = await open_tier(memory)
    while not tier.blocks:
        await asyncio.sleep(0.001)
    loading = asyncio.ensure_future(load(tier, memory, chain))
    await asyncio.sleep(0)
    tier.clear()
    await tier._tasks.join()
    go_on.set()
    await loading

    assert len(set(tier.slots._free)) == len(tier.slots._free)
    assert await tier.store(memory.outgoing(memory.chain("b", 32))) == 32
    assert await load(tier, memory, memory.chain("b", 32)) == 32


async def test_an_index_of_dead_records_is_rewritten(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.inference.tiers.slot_index.SPARE_RECORDS", 8)
    memory = Memory()
    tier = await open_tier(memory, slots=4)
    for number in range(20):
        await tier.store(memory.outgoing(memory.chain(str(number), 4)))
    await tier.close()

    assert (tier.folder / "index").stat().st_size <= 32 + 17 * 32
    tier = await open_tier(memory, slots=4)
    assert await load(tier, memory, memory.chain("19", 4)) == 4


async def test_a_smaller_budget_drops_what_lies_beyond(open_tier: OpenDisk) -> None:
    memory = Memory()
    tier = await open_tier(memory, slots=16)
    chain = memory.chain("a", 12)
    await tier.store(memory.outgoing(chain))
    await tier.close()

    tier = await open_tier(memory, slots=8)

    assert tier.capacity_blocks == tier.blocks == 8
    assert (tier.folder / "blocks").stat().st_size == 8 * 12288
    assert await load(tier, memory, chain) == 8


async def test_a_cancelled_load_writes_nothing_more(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 24)
    await tier.store(memory.outgoing(chain))
    reading = asyncio.Event()
    read, loop = SlotFile.read, asyncio.get_running_loop()

    def slow_read(file: SlotFile, *arguments: Any) -> bytes:
        loop.call_soon_threadsafe(reading.set)
        return read(file, *arguments)

    monkeypatch.setattr(SlotFile, "read", slow_read)
    blocks = memory.incoming(chain)
    task = asyncio.ensure_future(tier.load(blocks, lambda _: None))
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    for block in blocks:
        write_slot(memory.region, block.slot, bytes(memory.block_bytes))
    await asyncio.sleep(0.01)
    assert not any(any(read_slot(memory.region, block.slot)) for block in blocks)
    assert not tier.slots._reading
    monkeypatch.undo()
    assert await load(tier, memory, chain) == 24


async def test_zstd_is_lossless_and_int8_is_close(open_tier: OpenDisk) -> None:
    memory = Memory()
    chain = memory.chain("a", 4)
    chain.content = lambda index: bytes([index] * 8192)  # type: ignore[method-assign]
    tier = await open_tier(memory, codec=open_codec("zstd", 8192))
    await tier.store(memory.outgoing(chain))

    assert await load(tier, memory, chain) == 4
    assert tier.folder != (await open_tier(memory)).folder


async def test_the_first_load_replaces_the_guess_of_the_speed(
    open_tier: OpenDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(block_bytes=65_536)
    tier = await open_tier(memory)
    chain = memory.chain("a", 20)
    await tier.store(memory.outgoing(chain))
    assert tier.predict_load_s(20) < 0.1
    read = SlotFile.read

    def slow_read(*arguments: Any) -> bytes:
        clock.time_s += 0.5
        return read(*arguments)

    monkeypatch.setattr(SlotFile, "read", slow_read)
    assert await load(tier, memory, chain) == 20

    assert 3 < tier.predict_load_s(20) < 11  # threads may lose additions


async def test_a_load_that_is_given_up_teaches_the_speed(
    open_tier: OpenDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(block_bytes=65_536)
    tier = await open_tier(memory)
    chain = memory.chain("a", 20)
    await tier.store(memory.outgoing(chain))
    released = threading.Event()

    def stuck_read(*_: Any) -> bytes:
        released.wait(10)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SlotFile, "read", stuck_read)
    loading = asyncio.ensure_future(load(tier, memory, chain))
    await asyncio.sleep(0.01)
    clock.time_s += 2.5
    loading.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await loading

    assert tier.predict_load_s(20) > 2.5


async def test_a_slow_tier_is_tried_again(
    open_tier: OpenDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(block_bytes=65_536)
    tier = await open_tier(memory)
    chain = memory.chain("a", 20)
    await tier.store(memory.outgoing(chain))
    read = SlotFile.read

    def slow_read(*arguments: Any) -> bytes:
        clock.time_s += 0.5
        return read(*arguments)

    for minutes in (1, 2, 4):
        monkeypatch.setattr(SlotFile, "read", slow_read)
        assert await load(tier, memory, chain) == 20
        clock.time_s += 59 * minutes
        assert tier.predict_load_s(20) > 3
        clock.time_s += 2 * minutes
        assert tier.predict_load_s(20) < 0.1
    monkeypatch.undo()
    for _ in range(2):
        assert await load(tier, memory, chain) == 20
    assert tier.predict_load_s(20) < 0.1
    assert tier._estimate._forget_s == 60
