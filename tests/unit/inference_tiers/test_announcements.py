"""Emptying a tier: what is on its way is dropped, and routers learn of it in slices."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.invariants import check_slots
from tests.unit.inference_tiers.blocks import Memory, OpenDisk, OpenRemote, load

from dynamo.core.clock import SystemClock
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.inference.tiers import kv_tiers
from dynamo.inference.tiers.kv_tiers import TierAnnouncements
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.object_store import ObjectStore
from dynamo.inference.tiers.tier import KvTier
from dynamo.inference.tiers.tier_source import find_runs


async def check_a_store_in_flight_is_dropped(memory: Memory, tier: KvTier) -> None:
    storing = asyncio.ensure_future(tier.store(memory.outgoing(memory.chain("a", 3))))
    await asyncio.sleep(0)
    tier.clear()
    assert await storing == 0
    assert tier.blocks == 0
    assert tier.counters.stored_blocks == 0
    chain = memory.chain("a", 3)
    assert await tier.store(memory.outgoing(chain)) == 3
    assert await load(tier, memory, chain) == 3


async def test_a_store_in_flight_does_not_come_back(open_tier: OpenDisk) -> None:
    memory = Memory()
    await check_a_store_in_flight_is_dropped(memory, await open_tier(memory))
    host = MemoryTier.in_region(memory.region, 48, SystemClock())
    await check_a_store_in_flight_is_dropped(memory, host)
    check_slots(host.slots)
    await host.close()


@pytest.mark.timeout(90)
async def test_an_object_stored_too_late_is_deleted(
    open_remote: OpenRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(block_bytes=64)
    tier = await open_remote(memory)
    await check_a_store_in_flight_is_dropped(memory, tier)
    create = ObjectStore.create

    async def clear_and_create(store: ObjectStore, key: str, data: bytes) -> bool:
        tier.clear()
        return await create(store, key, data)

    monkeypatch.setattr(ObjectStore, "create", clear_and_create)
    assert await tier.store(memory.outgoing(memory.chain("b", 3))) == 0
    await tier._refresh()
    assert tier.blocks == 0


class CountingTier(MemoryTier):
    """Counts the lookups of blocks."""

    lookups = 0

    def holds(self, block_hash: int) -> bool:
        CountingTier.lookups += 1
        return super().holds(block_hash)


async def test_tiers_that_alternate_are_searched_once() -> None:
    memory = Memory(slots=400, block_bytes=64)
    chain = memory.chain("a", 100)
    tiers = [CountingTier.in_region(memory.region, 200, SystemClock()) for _ in range(2)]
    blocks = memory.outgoing(chain)
    await tiers[0].store(blocks[::2])
    await tiers[1].store(blocks)
    CountingTier.lookups = 0

    runs = find_runs(tiers, chain.hashes, 1)

    assert [(run.tier, run.first, run.blocks) for run in runs] == [
        (tiers[index % 2], index, 1) for index in range(1, 100)
    ]
    assert CountingTier.lookups <= 2 * 99
    for tier in tiers:
        await tier.close()


class Listener:
    """Holds the blocks that a router knows, and the largest number of blocks in one turn."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.largest = 0
        self.announcements = TierAnnouncements(self.publish)

    def publish(self) -> None:
        self.apply(self.announcements.take_events())

    def apply(self, events: list[KvEvent]) -> None:
        count = 0
        for event in events:
            assert isinstance(event, BlocksStored | BlocksRemoved)
            count += len(event.hashes)
            if isinstance(event, BlocksStored):
                self.held.update(event.hashes)
            else:
                self.held.difference_update(event.hashes)
        self.largest = max(self.largest, count)

    async def settle(self) -> None:
        await self.announcements._background.join()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "SLICE_BLOCKS", 4)
    monkeypatch.setattr(kv_tiers, "SNAPSHOT_BLOCKS", 8)


async def test_large_tiers_are_announced_in_slices(open_tier: OpenDisk, small_slices: None) -> None:
    memory, listener = Memory(), Listener()
    tier = await open_tier(memory)
    first, second = memory.chain("a", 8), memory.chain("b", 12)
    await tier.store(memory.outgoing(first))
    assert len(listener.announcements.snapshot_events([tier])) == 1, "a small tier at once"
    await tier.store(memory.outgoing(second))

    assert listener.announcements.snapshot_events([tier]) == []
    await listener.settle()

    assert listener.held == {*first.hashes, *second.hashes}
    assert listener.largest == 4


async def test_a_block_stored_again_is_not_removed_by_the_slices(
    open_tier: OpenDisk, small_slices: None
) -> None:
    memory, listener = Memory(), Listener()
    tier = await open_tier(memory)
    chain = memory.chain("a", 20)
    await tier.store(memory.outgoing(chain))
    listener.apply(tier.take_events())
    listener.announcements.snapshot_events([tier])
    await asyncio.sleep(0)

    listener.announcements.on_cleared(tier, tier.clear())
    listener.largest = 0
    assert await tier.store(memory.outgoing(chain, 15)) == 5
    listener.apply(tier.take_events())
    await listener.settle()

    assert listener.held == {*chain.hashes[15:]}
    assert listener.largest == 5
    await listener.announcements.close()
