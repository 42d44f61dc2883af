"""Two workers that share a bucket, under clears and random operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from tests.unit.inference_tiers.blocks import Memory, OpenRemote, load

from dynamo.core.tasks import run_all
from dynamo.core.values import BlocksStored
from dynamo.inference.tiers.object_store import ObjectMissing
from dynamo.inference.tiers.remote import HEADERS_AT_ONCE, RemoteTier

pytestmark = pytest.mark.timeout(90)  # the first test starts the server

OBJECTS = 2 * HEADERS_AT_ONCE + 4
CHAINS = 6
STEPS = 40


def after(calls: int, method: Callable[..., Any], action: Callable[[], object]) -> Any:
    """Return `method`, which lets the event loop do `action` soon after so many calls."""
    count = 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls:
            asyncio.get_running_loop().call_soon(action)
        return method(*arguments)

    return counted


@pytest.mark.parametrize("step", ["_learn", "_forget"])
async def test_a_listing_ends_when_the_tier_is_emptied(open_remote: OpenRemote, step: str) -> None:
    memory = Memory(slots=8)
    writer, reader = await open_remote(memory), await open_remote(memory)
    for number in range(OBJECTS):
        assert await writer.store(memory.outgoing(memory.chain(str(number), 1))) == 1
    if step == "_forget":
        await reader._refresh()
        assert reader.blocks == OBJECTS
        writer.clear()
        await writer._deletions.join()
    calls: list[int] = []
    counted = after(HEADERS_AT_ONCE, getattr(reader, step), reader.clear)
    setattr(reader, step, lambda *args: (calls.append(1), counted(*args))[1])
    await reader._refresh()
    assert (reader.blocks, len(calls)) == (0, HEADERS_AT_ONCE)


class Worker:
    """A tier, and what a router knows of it."""

    def __init__(self, tier: RemoteTier, memory: Memory) -> None:
        self.tier = tier
        self.memory = memory
        self.known: set[int] = set()

    def publish(self) -> None:
        for event in self.tier.take_events():
            hashes = getattr(event, "hashes", ())
            change = self.known.update if isinstance(event, BlocksStored) else None
            (change or self.known.difference_update)(hashes)

    async def store(self, name: str, blocks: int) -> None:
        await self.tier.store(self.memory.outgoing(self.memory.chain(name, blocks)))

    async def load(self, name: str, blocks: int) -> None:
        await load(self.tier, self.memory, self.memory.chain(name, blocks))

    async def refresh(self, name: str, blocks: int) -> None:
        del name, blocks
        await self.tier._refresh()

    async def clear(self, name: str, blocks: int) -> None:
        del name, blocks
        await asyncio.sleep(0)
        self.publish()
        self.known.difference_update(self.tier.clear())

    async def damage(self, name: str, blocks: int) -> None:
        """Cut the object that has this block, or delete it."""
        tier = self.tier
        object_name = tier._table.name_of(self.memory.chain(name, blocks).hashes[-1])
        if object_name is None:
            return
        key = tier._key(object_name)
        with suppress(ObjectMissing):
            data = await tier._store.get(key, 1 << 20)
            await tier._store.delete([key])
            if blocks % 2:
                await tier._store.create(key, bytes(data[:-1]))


OPERATIONS = ("store", "store", "load", "load", "refresh", "clear", "damage")


@pytest.mark.parametrize("seed", range(4))
async def test_blocks_are_right_under_random_operations(open_remote: OpenRemote, seed: int) -> None:
    random, memory = Random(seed), Memory(slots=256)
    workers = [Worker(await open_remote(memory), memory) for _ in range(2)]
    for _ in range(STEPS):
        works = [
            getattr(random.choice(workers), random.choice(OPERATIONS))(
                str(random.randrange(CHAINS)), random.randint(1, 9)
            )
            for _ in range(random.randint(1, 3))
        ]
        await run_all(*works)
        for worker in workers:
            worker.publish()
            held = {block for _, block in worker.tier.held_blocks()}
            assert worker.known == held
            assert worker.tier.blocks == len(held)
            assert not worker.tier._storing
            assert not worker.tier.problem
    for worker in workers:
        await worker.tier._deletions.join()
    for worker in workers:
        tier = worker.tier
        await tier._refresh()
        listed = [
            item.key async for page in tier._store.list_objects(tier._folder) for item in page
        ]
        assert {tier._key(name) for name in tier._table.objects} <= set(listed)
