"""`KVCacheBlockManager` over the real pool and tiers: bytes survive every move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from tests.support.invariants import check_pool

from dynamo.core.errors import ConfigError, NotFound, Overloaded
from dynamo.inference.memory import (
    AccessPatternAnalyzer,
    KVBlock,
    KVCacheBlockManager,
    LRUCachePolicy,
    MatchingBlocks,
)

MODEL = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=4, block_size=4)
BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
DEVICE_BLOCKS, HOST_BLOCKS = 8, 16


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[KVCacheBlockManager]:
    manager = KVCacheBlockManager(
        {
            "gpu_memory_size": DEVICE_BLOCKS * BLOCK_BYTES,
            "cpu_memory_size": HOST_BLOCKS * BLOCK_BYTES,
            "ssd_cache_path": str(tmp_path / "kv"),
            "ssd_cache_size": 10 << 20,
        }
    )
    yield manager
    await manager.close()


async def allocate(manager: KVCacheBlockManager, first: int, length: int = 16) -> list[KVBlock]:
    """Allocate a sequence of tokens and write bytes into its blocks."""
    blocks = await manager.allocate_kv_blocks(length, MODEL, list(range(first, first + length)))
    for number, block in enumerate(blocks):
        manager.memory(block)[:] = bytes([first % 251, number]) * (BLOCK_BYTES // 2)
    return blocks


def content(manager: KVCacheBlockManager, block: KVBlock) -> bytes:
    return bytes(manager.memory(block)[:2])


def name(manager: KVCacheBlockManager, first: int, length: int = 16) -> str:
    return manager.prefix_tree.prefix_hash(list(range(first, first + length)))


async def test_blocks_are_counted_allocated_and_found_by_their_prefix(
    manager: KVCacheBlockManager,
) -> None:
    blocks = await allocate(manager, 100, length=14)  # three full blocks, and two tokens
    assert len(blocks) == 4
    assert {block.tier for block in blocks} == {"device"}
    info = await manager.query_cache_hit(name(manager, 100, 14))
    assert (info.hit_ratio, info.hit_pattern, info.estimated_load_time) == (1.0, "full", 0.0)
    assert info.hit_blocks == blocks
    assert (await manager.query_cache_hit(name(manager, 7))).hit_pattern == "none"
    assert (await manager.query_cache_hit(name(manager, 100, 14), worker_id=3)).hit_ratio == 0
    assert set(manager.access_analyzer.access_counts.values()) == {1}


@pytest.mark.parametrize("way", [["cpu", "gpu"], ["ssd", "gpu"], ["cpu", "ssd", "gpu"]])
async def test_bytes_survive_migrations(manager: KVCacheBlockManager, way: list[str]) -> None:
    blocks = await allocate(manager, 100)
    for target in way:
        result = await manager.migrate_cache_blocks(blocks, target)
        assert not result.failed
        tier = manager.memory_tiers[target].tier
        assert {block.tier for block in result.migrated} == {tier}
        info = await manager.query_cache_hit(name(manager, 100))
        assert (info.hit_ratio, {block.tier for block in info.hit_blocks}) == (1.0, {tier})
        assert (info.estimated_load_time > 0) == (target != "gpu")
        blocks = result.migrated
    assert [content(manager, block) for block in blocks] == [bytes([100, n]) for n in range(4)]
    assert manager.migrations == {"migrated": 4 * len(way), "failed": 0}


async def test_cold_blocks_move_down_when_the_device_is_full(manager: KVCacheBlockManager) -> None:
    first, second = await allocate(manager, 100), await allocate(manager, 200)
    await manager.query_cache_hit(name(manager, 100))  # the first is used later than the second
    third = await allocate(manager, 300)
    assert [content(manager, block) for block in (*first, *third)] == [
        bytes([start, n]) for start in (100, 300 % 251) for n in range(4)
    ]
    with pytest.raises(NotFound, match="not on the device"):
        manager.memory(second[0])
    assert (await manager.query_cache_hit(name(manager, 200))).estimated_load_time > 0

    await manager.free(first)
    back = await manager.migrate_cache_blocks(second, "gpu")
    assert [content(manager, block) for block in back.migrated] == [
        bytes([200, n]) for n in range(4)
    ]


async def test_partial_failures_are_kept_apart(manager: KVCacheBlockManager) -> None:
    blocks = await allocate(manager, 100)
    below = (await manager.migrate_cache_blocks(blocks, "cpu")).migrated
    host = manager.memory_tiers["cpu"].backend
    assert host is not None
    await manager.free(below[:1])
    result = await manager.migrate_cache_blocks(below, "gpu")
    assert result.migrated == blocks[1:]
    assert [(block, error.code) for block, error in result.failed] == [(below[0], "not_found")]

    await manager.migrate_cache_blocks(result.migrated, "cpu")
    host.clear()
    lost = await manager.migrate_cache_blocks(blocks[1:], "gpu")
    assert [error.code for _, error in lost.failed] == ["transfer_failed"] * 3
    info = await manager.query_cache_hit(name(manager, 100))
    assert (info.hit_pattern, len(info.missing_blocks)) == ("none", 3)


@pytest.mark.parametrize("target", ["cpu", "ssd", "gpu"])
async def test_blocks_may_be_freed_and_moved_twice_while_they_move(
    manager: KVCacheBlockManager, target: str
) -> None:
    blocks = await allocate(manager, 100)
    if target == "gpu":
        blocks = (await manager.migrate_cache_blocks(blocks, "cpu")).migrated
    moves = [asyncio.ensure_future(manager.migrate_cache_blocks(blocks, target)) for _ in range(2)]
    await asyncio.sleep(0.001)
    await manager.free(blocks[:2])
    await asyncio.gather(*moves)

    await manager.free(blocks)
    check_pool(manager._pool)
    assert manager._pool.free == DEVICE_BLOCKS


async def test_first_calls_at_once_open_the_tiers_once(manager: KVCacheBlockManager) -> None:
    first, second = await asyncio.gather(allocate(manager, 100), allocate(manager, 200))

    assert manager._pool.active == len(first) + len(second)
    assert (await manager.migrate_cache_blocks(first, "ssd")).migrated


async def test_a_failed_start_closes_its_tiers_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_bytes(b"")
    size = DEVICE_BLOCKS * BLOCK_BYTES
    config = {"gpu_memory_size": size, "cpu_memory_size": size, "ssd_cache_path": path}
    manager = KVCacheBlockManager(config)
    with pytest.raises(ConfigError, match="cannot be stored"):
        await allocate(manager, 0)
    assert [tier.backend for tier in manager.memory_tiers.values()] == [None] * 3

    path.unlink()
    assert len(await allocate(manager, 0)) == 4
    await manager.close()


async def test_errors_say_what_to_change() -> None:
    small = KVCacheBlockManager({"gpu_memory_size": 2 * BLOCK_BYTES})
    with pytest.raises(ConfigError, match="num_layers"):
        await small.allocate_kv_blocks(4, {"head_dim": 8})
    await allocate(small, 1, length=8)
    with pytest.raises(Overloaded, match="room for 0 of 1 blocks"):
        await small.allocate_kv_blocks(4, MODEL)
    with pytest.raises(ConfigError, match="1536 bytes in a manager"):
        await small.allocate_kv_blocks(4, {**vars(MODEL), "num_layers": 3})
    with pytest.raises(NotFound, match="no tier 'ssd'"):
        await small.migrate_cache_blocks([], "ssd")
    await small.close()


def test_patterns_of_hits() -> None:
    blocks = [KVBlock(number, b"") for number in range(3)]
    patterns = {
        tuple(held): AccessPatternAnalyzer().analyze_hit_pattern(
            MatchingBlocks(blocks, [block for block in blocks if block.id in held], [], 1.0)
        )
        for held in ([], [0, 1, 2], [0], [1, 2], [0, 2])
    }
    assert list(patterns.values()) == ["none", "full", "prefix", "scattered", "scattered"]


async def test_the_policy_names_the_least_recently_used_blocks() -> None:
    policy, blocks = LRUCachePolicy(), [KVBlock(number, b"") for number in range(4)]
    await policy.on_allocation(blocks)
    policy.on_access(blocks[:1])
    policy.on_removal(blocks[1:2])
    assert policy.select_victims(2) == blocks[2:]
    assert policy.select_victims(9) == [*blocks[2:], blocks[0]]


async def test_a_part_of_a_block_is_no_prompt_that_ends_in_zeros(
    manager: KVCacheBlockManager,
) -> None:
    (part,) = await manager.allocate_kv_blocks(3, MODEL, [7, 8, 9])
    (full,) = await manager.allocate_kv_blocks(4, MODEL, [7, 8, 9, 0])
    for block, byte in ((part, b"p"), (full, b"f")):
        manager.memory(block)[:] = byte * BLOCK_BYTES
    for tier in ("cpu", "gpu"):
        assert len((await manager.migrate_cache_blocks([part, full], tier)).migrated) == 2
    assert (content(manager, part), content(manager, full)) == (b"pp", b"ff")


async def test_a_full_host_tier_gives_its_oldest_blocks_to_the_disk(
    manager: KVCacheBlockManager,
) -> None:
    """Seven sequences of four blocks: two fit on the device, four in host memory."""
    starts = [100 * number for number in range(1, 8)]
    for start in starts:
        await allocate(manager, start)
    tiers = {}
    for start in starts:
        info = await manager.query_cache_hit(name(manager, start))
        assert info.hit_ratio == 1.0
        tiers[start] = {block.tier for block in info.hit_blocks}
    assert list(tiers.values()) == [{"disk"}, *[{"host"}] * 4, *[{"device"}] * 2]

    await manager.free((await manager.query_cache_hit(name(manager, 700))).hit_blocks)
    info = await manager.query_cache_hit(name(manager, 100))
    back = await manager.migrate_cache_blocks(info.hit_blocks, "gpu")
    assert [content(manager, block) for block in back.migrated] == [
        bytes([100, number]) for number in range(4)
    ]


async def test_blocks_move_between_lower_tiers_while_the_device_is_full(
    manager: KVCacheBlockManager,
) -> None:
    first = await allocate(manager, 100)
    for start in (200, 300):
        await allocate(manager, start)
    for target in ("ssd", "cpu", "ssd"):
        result = await manager.migrate_cache_blocks(first, target)
        assert not result.failed
    assert {block.tier for block in result.migrated} == {"disk"}


async def test_the_last_tier_drops_its_oldest_blocks(tmp_path: Path) -> None:
    size = DEVICE_BLOCKS * BLOCK_BYTES
    manager = KVCacheBlockManager({"gpu_memory_size": size, "cpu_memory_size": size})
    for start in range(100, 600, 100):
        await allocate(manager, start)
    patterns = [
        (await manager.query_cache_hit(name(manager, start))).hit_pattern
        for start in range(100, 600, 100)
    ]
    assert patterns == ["none", "full", "full", "full", "full"]
    await manager.close()


async def test_a_tier_without_room_for_one_block_is_passed_over(tmp_path: Path) -> None:
    config = {
        "gpu_memory_size": 4 * BLOCK_BYTES,
        "cpu_memory_size": BLOCK_BYTES - 1,
        "ssd_cache_path": str(tmp_path / "kv"),
    }
    manager = KVCacheBlockManager(config)
    first, _ = await allocate(manager, 100), await allocate(manager, 200)
    info = await manager.query_cache_hit(name(manager, 100))
    assert [block.tier for block in info.hit_blocks] == ["disk"] * len(first)
    await manager.close()


async def test_allocations_at_once_all_find_room(manager: KVCacheBlockManager) -> None:
    starts = range(100, 2_100, 100)
    await asyncio.gather(*(manager.allocate_kv_blocks(16, MODEL, [start] * 16) for start in starts))
    check_pool(manager._pool)
    for start in starts:
        info = await manager.query_cache_hit(manager.prefix_tree.prefix_hash([start] * 16))
        assert info.hit_ratio == 1.0


async def test_blocks_of_the_same_content_share_a_copy_below(manager: KVCacheBlockManager) -> None:
    first, second = await allocate(manager, 100), await allocate(manager, 100)
    moved = await manager.migrate_cache_blocks([*first, *second], "ssd")
    assert not moved.failed
    await manager.free(first)
    back = await manager.migrate_cache_blocks(second, "gpu")
    assert content(manager, back.migrated[0]) == bytes([100, 0])


async def test_a_copy_that_is_below_already_is_not_evicted_by_others_of_the_same_call() -> None:
    config = {"gpu_memory_size": DEVICE_BLOCKS * BLOCK_BYTES, "cpu_memory_size": 4 * BLOCK_BYTES}
    manager = KVCacheBlockManager(config)
    first = await allocate(manager, 100)
    for tier in ("cpu", "gpu"):
        await manager.migrate_cache_blocks(first, tier)  # leaves copies below
    second = await allocate(manager, 200)
    moved = await manager.migrate_cache_blocks([*second[:2], *first[:2]], "cpu")
    back = await manager.migrate_cache_blocks(moved.migrated, "gpu")
    assert [content(manager, block) for block in back.migrated] == [
        bytes([start, number]) for start in (200, 100) for number in range(2)
    ]
    await manager.close()


async def test_a_sequence_that_is_longer_than_a_tier_moves_through_it(tmp_path: Path) -> None:
    config = {
        "gpu_memory_size": DEVICE_BLOCKS * BLOCK_BYTES,
        "cpu_memory_size": 3 * BLOCK_BYTES,
        "ssd_cache_path": str(tmp_path / "kv"),
    }
    manager = KVCacheBlockManager(config)
    blocks = await allocate(manager, 100, length=4 * DEVICE_BLOCKS)
    assert not (await manager.migrate_cache_blocks(blocks, "cpu")).failed
    info = await manager.query_cache_hit(name(manager, 100, 4 * DEVICE_BLOCKS))
    assert [block.tier for block in info.hit_blocks].count("host") == 3
    back = await manager.migrate_cache_blocks(info.hit_blocks, "gpu")
    assert [content(manager, block) for block in back.migrated] == [
        bytes([100, number]) for number in range(DEVICE_BLOCKS)
    ]
    await manager.close()


@pytest.mark.parametrize("disk_bytes", [0, 24 << 10, 10 << 20])
@pytest.mark.parametrize("seed", range(3))
async def test_calls_at_once_leave_no_block_lost_or_counted_twice(
    tmp_path: Path, disk_bytes: int, seed: int
) -> None:
    config = {"gpu_memory_size": DEVICE_BLOCKS * BLOCK_BYTES, "cpu_memory_size": 4 * BLOCK_BYTES}
    disk = {"ssd_cache_path": str(tmp_path / "kv"), "ssd_cache_size": disk_bytes}
    manager, rng = KVCacheBlockManager(config | (disk if disk_bytes else {})), Random(seed)
    sequences: list[list[KVBlock]] = []

    async def call(number: int) -> None:
        for step in range(5):
            if not sequences or rng.random() < 0.5:
                tokens = [rng.choice((1, number + 2, step + 90))] * 16
                sequences.append(await manager.allocate_kv_blocks(16, MODEL, tokens))
            elif rng.random() < 0.4:
                await manager.free(sequences.pop(rng.randrange(len(sequences))))
            else:
                tier = rng.choice(list(manager.memory_tiers))
                await manager.migrate_cache_blocks(rng.choice(sequences), tier)

    await asyncio.gather(*map(call, range(20)))
    for sequence in sequences:
        await manager.free(sequence)
    check_pool(manager._pool)
    assert manager._pool.free == DEVICE_BLOCKS
    assert [len(needed) for needed in manager._lower._needed.values()] == [0] * (
        len(manager.memory_tiers) - 1
    )
    await manager.close()
