"""`DiskTier` on disks that are full or broken, and with settings that cannot work."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.unit.inference_tiers.blocks import (
    ManualClock,
    Memory,
    OpenDisk,
    count_held,
    fail,
    held_blocks,
    load,
)

from dynamo.core.errors import ConfigError
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.tiers.disk import RETRY_S
from dynamo.inference.tiers.disk_part import DiskPart
from dynamo.inference.tiers.offload import TierWriter


async def test_a_failing_write_makes_it_read_only_for_a_minute(
    open_tier: OpenDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain, other = memory.chain("a", 2), memory.chain("b", 2)
    await tier.store(memory.outgoing(chain))
    monkeypatch.setattr(os, "pwritev", fail(OSError(28, "No space left on device")))

    assert await tier.store(memory.outgoing(other)) == 0

    assert "No space left on device" in tier.problem
    assert str(tier.folder) in tier.problem
    monkeypatch.undo()
    assert await tier.store(memory.outgoing(other)) == 0, "tried again at once"
    assert await load(tier, memory, chain) == 2
    clock.time_s += RETRY_S
    assert tier.problem == ""
    assert await tier.store(memory.outgoing(other)) == 2
    assert tier.counters.failures == 1


async def test_a_broken_disk_is_not_read_for_a_minute(
    open_tier: OpenDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 8)
    await tier.store(memory.outgoing(chain))
    monkeypatch.setattr(os, "preadv", fail(OSError(5, "Input/output error")))

    for _ in range(3):
        assert await load(tier, memory, chain, first=tier.blocks - 1) == 0

    assert "Input/output error" in tier.problem
    assert not count_held(tier, chain.hashes)
    assert await load(tier, memory, chain) == 0
    monkeypatch.undo()
    clock.time_s += RETRY_S
    assert await load(tier, memory, chain) == 5
    assert held_blocks(tier.take_events(), "disk") == set(chain.hashes[:5])


async def test_a_full_disk_refuses_blocks_and_serves_on(open_tier: OpenDisk, tmpfs: Path) -> None:
    memory = Memory()
    tier = await open_tier(memory, slots=40, path=tmpfs)
    first = memory.chain("a", 30)
    assert await tier.store(memory.outgoing(first)) == 30
    with suppress(OSError), (tmpfs / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    names = iter(range(1000))
    while not tier.problem:
        await tier.store(memory.outgoing(memory.chain(str(next(names)), 30)))
    assert "No space left" in tier.problem
    held = [block_hash for _, block_hash in tier.held_blocks()]
    assert count_held(tier, held) == len(held) > 0


@pytest.mark.parametrize(
    ("slots", "hint"), [(0, "raise --kv-disk-size"), (100, "lower --kv-disk-size")]
)
async def test_a_size_that_cannot_work_is_refused(
    open_tier: OpenDisk, tmpfs: Path, slots: int, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        await open_tier(Memory(), slots=slots, path=tmpfs)
    assert hint in refused.value.hint
    assert refused.value.param == "cache.ssd_size"


async def test_a_path_that_cannot_be_written_is_refused(
    open_tier: OpenDisk, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/kv")):
        with pytest.raises(ConfigError, match=str(path)) as refused:
            await open_tier(Memory(), path=path)
        assert "--kv-disk-path" in refused.value.hint


async def test_without_direct_access_blocks_go_through_the_page_cache(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 1 << 30)  # unknown: open() ignores it, or refuses
    opened = os.open

    def refuse(path: Any, flags: int, *mode: Any) -> int:
        if flags & 1 << 30:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    memory = Memory()
    tier = await open_tier(memory)
    chain = memory.chain("a", 4)

    assert not tier._part.file.is_direct
    assert await tier.store(memory.outgoing(chain)) == 4
    assert await load(tier, memory, chain) == 4


async def test_an_unexpected_error_does_not_end_the_offload(
    open_tier: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    tier = await open_tier(memory)
    first, second = memory.chain("a", 2), memory.chain("b", 2)

    def fail_encoding(*_: Any) -> bool:
        raise MemoryError

    async with BackgroundTasks() as tasks:
        writer = TierWriter(tier, lambda: None)
        tasks.start(writer.run())
        with monkeypatch.context() as patch:
            patch.setattr(DiskPart, "write_block", fail_encoding)
            writer.add(memory.outgoing(first))
            while writer.storing:
                await asyncio.sleep(0.001)
        writer.add(memory.outgoing(second))
        while not tier.blocks:
            await asyncio.sleep(0.001)

    assert count_held(tier, second.hashes) == 2
