"""`RemoteTier` on a real S3 server: what one worker stores all can load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.inference_tiers.blocks import Memory, OpenRemote, count_held, held_blocks, load

from dynamo.inference.tiers import remote
from dynamo.inference.tiers.codecs import open_codec
from dynamo.inference.tiers.object_store import ListedObject
from dynamo.inference.tiers.remote import RemoteTier
from dynamo.inference.tiers.run_object import MAX_RUN_BLOCKS
from dynamo_conformance.transfer import read_slot, write_slot

pytestmark = pytest.mark.timeout(90)  # the first test starts the server


async def objects(tier: RemoteTier) -> list[ListedObject]:
    """Return the tier's objects."""
    return [item async for page in tier._store.list_objects(tier._folder) for item in page]


async def keys(tier: RemoteTier) -> list[str]:
    """Return the keys of the tier's objects."""
    return sorted(item.key for item in await objects(tier))


async def change_object(tier: RemoteTier, change: int) -> None:
    """Cut off the end of the only object (-1), or flip a bit of its byte `change`."""
    (key,) = await keys(tier)
    data = bytearray(await tier._store.get(key, 1 << 20))
    if change < 0:
        del data[-1]
    else:
        data[change] ^= 4
    await tier._store.delete([key])
    await tier._store.create(key, bytes(data))


@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_what_one_worker_stores_another_loads(open_remote: OpenRemote, codec: str) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 40)
    writer = await open_remote(memory, codec=open_codec(codec, 64))
    assert await writer.store(memory.outgoing(chain)) == 40
    assert held_blocks(writer.take_events(), "shared") == set(chain.hashes)

    reader = await open_remote(memory, codec=open_codec(codec, 64))

    assert reader.blocks == count_held(reader, chain.hashes) == 40
    assert held_blocks(reader.take_events(), "shared") == set(chain.hashes)
    assert {*reader.held_blocks()} == {*writer.held_blocks()}
    assert await load(reader, memory, chain) == 40
    assert await load(reader, memory, chain, first=5) == 35
    assert reader.counters.loaded_blocks == 75


async def test_an_object_is_a_run_named_by_its_last_block(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain, other = memory.chain("a", 40), memory.chain("b", 2)
    tier = await open_remote(memory)

    await tier.store([*memory.outgoing(other), *memory.outgoing(chain)][::-1])

    lasts = [chain.hashes[MAX_RUN_BLOCKS - 1], chain.hashes[-1], other.hashes[-1]]
    names = [f"{block_hash:016x}" for block_hash in lasts]
    assert await keys(tier) == sorted(f"{tier._folder}/{name[:2]}/{name}" for name in names)


async def test_the_first_writer_wins(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 6)
    first, second = await open_remote(memory), await open_remote(memory)
    assert await first.store(memory.outgoing(chain, 2)) == 4

    assert await second.store(memory.outgoing(chain)) == 4
    assert second.counters.stored_blocks == 0
    assert count_held(second, chain.hashes) == 0
    assert await second.store(memory.outgoing(chain)) == 2

    assert len(await keys(first)) == 2
    assert await load(second, memory, chain) == 6


async def test_a_listing_finds_new_objects_and_drops_missing_ones(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    old, new = memory.chain("old", 3), memory.chain("new", 3)
    writer, reader = await open_remote(memory), await open_remote(memory)
    await writer.store(memory.outgoing(old))
    await reader._refresh()
    assert count_held(reader, old.hashes) == 3

    await writer._store.delete(await keys(writer))
    await writer.store(memory.outgoing(new))
    await reader._refresh()

    assert (count_held(reader, old.hashes), count_held(reader, new.hashes)) == (0, 3)
    assert held_blocks(reader.take_events(), "shared") == set(new.hashes)


async def test_the_newest_objects_of_others_are_known_and_no_more(
    open_remote: OpenRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_LISTED", 3)
    memory = Memory(block_bytes=64)
    chains = [memory.chain(str(number), 2) for number in range(6)]
    writer, reader = await open_remote(memory), await open_remote(memory)
    await reader.store(memory.outgoing(memory.chain("own", 2)))
    for number in (4, 6):
        for chain in chains[number - 4 : number]:
            await writer.store(memory.outgoing(chain))
        await asyncio.sleep(1.1)  # the server's times have seconds

        for _ in range(3):
            await reader._refresh()
            assert reader.blocks == 2 + 3 * 2

    assert all(count_held(reader, chain.hashes) == 2 for chain in chains[4:])
    assert count_held(reader, memory.chain("own", 2).hashes) == 2


async def test_other_work_goes_on_while_objects_are_forgotten(
    open_remote: OpenRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(block_bytes=64)
    writer, reader = await open_remote(memory), await open_remote(memory)
    for number in range(3):
        await writer.store(memory.outgoing(memory.chain(str(number), 2)))
    await reader._refresh()
    assert reader.blocks == 3 * 2
    monkeypatch.setattr(remote, "MAX_LISTED", 0)
    monkeypatch.setattr(remote, "HEADERS_AT_ONCE", 1)
    turns: list[str] = []
    drop = reader._drop

    def note(name: int) -> Sequence[int]:
        turns.append("drop")
        asyncio.get_running_loop().call_soon(turns.append, "other work")
        return drop(name)

    monkeypatch.setattr(reader, "_drop", note)
    await reader._refresh()

    assert reader.blocks == 0
    assert turns == ["drop", "other work"] * 3


async def test_the_oldest_objects_above_the_limit_are_deleted(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chains = [memory.chain(str(number), 2) for number in range(5)]
    writer = await open_remote(memory)
    for chain in chains:
        await writer.store(memory.outgoing(chain))
        await asyncio.sleep(1.1)  # the server's times have seconds
    (size,) = {item.size for item in await objects(writer)}

    limited = await open_remote(memory, max_store_bytes=3 * size)
    await writer._refresh()

    assert len(await keys(limited)) == 3
    for tier in (limited, writer):
        assert [count_held(tier, chain.hashes) for chain in chains] == [0, 0, 2, 2, 2]
    removed = {*chains[0].hashes, *chains[1].hashes}
    assert held_blocks(writer.take_events(), "shared").isdisjoint(removed)
    assert await load(limited, memory, chains[4]) == 2


async def test_an_empty_object_does_not_end_the_listing(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)
    writer, reader = await open_remote(memory), await open_remote(memory)
    await writer.store(memory.outgoing(chain))
    await writer._store.create(writer._key(memory.chain("b", 1).hashes[0]), b"")

    await reader._refresh()

    assert count_held(reader, chain.hashes) == 3


async def test_an_object_that_became_too_large_is_not_read(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    (key,) = await keys(tier)
    await tier._store.delete([key])
    await tier._store.create(key, bytes(tier._max_bytes + 1))

    assert await load(tier, memory, chain) == 0

    await tier._deletions.join()
    assert not await keys(tier)
    assert tier.counters.corrupt_blocks == 1


async def test_a_missing_object_costs_one_failed_load_and_an_event(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 40)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    tier.take_events()
    await tier._store.delete([tier._key(chain.hashes[-1])])

    assert await load(tier, memory, chain) == MAX_RUN_BLOCKS

    assert count_held(tier, chain.hashes) == MAX_RUN_BLOCKS
    (event,) = tier.take_events()
    assert set(event.hashes) == set(chain.hashes[MAX_RUN_BLOCKS:])
    assert (tier.problem, tier.counters.failures) == ("", 0)


@pytest.mark.parametrize("change", [-1, 0, 20, 40, 200, 400])
async def test_a_damaged_object_is_replaced(open_remote: OpenRemote, change: int) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 4)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    await change_object(tier, change)

    assert await load(tier, memory, chain) < 4
    assert tier.counters.corrupt_blocks == 1
    assert not tier.blocks

    await tier._deletions.join()
    assert await tier.store(memory.outgoing(chain)) == 4
    assert await load(tier, memory, chain) == 4


async def test_a_block_of_another_prompt_with_the_same_hash_is_not_loaded(
    open_remote: OpenRemote,
) -> None:
    memory = Memory(block_bytes=64)
    chain, forged = memory.chain("a", 3), memory.chain("b", 3)
    forged.hashes = chain.hashes
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))

    assert await load(tier, memory, forged) == 0

    await tier._refresh()
    assert await load(tier, memory, chain) == 3, "the right object was deleted"


async def test_a_slot_that_gets_another_owner_is_not_stored(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 5)
    tier = await open_remote(memory)
    blocks = memory.outgoing(chain)
    memory.region.generations[blocks[3].slot] += 1

    assert await tier.store(blocks) == 3

    assert count_held(tier, chain.hashes) == 3
    assert await load(tier, memory, chain) == 3


async def test_other_layouts_are_apart_and_clear_deletes(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 3)
    tier, other = await open_remote(memory), await open_remote(memory, "another model")
    await tier.store(memory.outgoing(chain))
    await other._refresh()
    assert other.blocks == 0
    await other.store(memory.outgoing(chain))

    assert {*tier.clear()} == {*chain.hashes}
    await tier._deletions.join()

    assert (await keys(tier), len(await keys(other))) == ([], 1)
    assert tier.blocks == 0


async def test_a_cancelled_load_writes_nothing_more(open_remote: OpenRemote) -> None:
    memory = Memory(block_bytes=64)
    chain = memory.chain("a", 40)
    tier = await open_remote(memory)
    await tier.store(memory.outgoing(chain))
    blocks = memory.incoming(chain)
    task = asyncio.ensure_future(tier.load(blocks, lambda _: task.cancel()))
    with pytest.raises(asyncio.CancelledError):
        await task

    for block in blocks:
        write_slot(memory.region, block.slot, bytes(64))
    await asyncio.sleep(0.01)

    assert not any(any(read_slot(memory.region, block.slot)) for block in blocks)
    assert tier.problem == ""
    assert await load(tier, memory, chain) == 40
