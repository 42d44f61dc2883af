"""A `DiskTier` never returns a wrong block, whatever happens to its files and in whatever order."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.invariants import check_slots
from tests.unit.inference_tiers.blocks import (
    Chain,
    ManualClock,
    Memory,
    count_held,
    held_blocks,
    load,
)

from dynamo.core.values import KvEvent
from dynamo.inference.tiers.disk import DiskTier

SLOTS = 6
SLOT_BYTES = 8192
NAMES = "abc"

damages = st.tuples(
    st.sampled_from(["blocks", "index"]),
    st.sampled_from(["cut", "flip", "zero", "delete", "append"]),
    st.floats(0, 1, exclude_max=True),
)
operations = st.one_of(
    st.tuples(
        st.sampled_from(["store", "load"]),
        st.sampled_from(NAMES),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    st.tuples(st.just("restart"), st.lists(damages, max_size=3)),
    st.tuples(st.just("lost_owner"), st.sampled_from(NAMES)),
    st.tuples(st.just("clear")),
)


def damage(folder: Path, name: str, kind: str, where: float) -> None:
    """Damage a file at a place between its start (0) and its end (1)."""
    path = folder / name
    data = bytearray(path.read_bytes())
    at = int(where * len(data))
    if kind == "delete":
        path.unlink()
        return
    if kind == "cut":
        del data[at:]
    elif kind == "append":
        data += b"\x01" * (1 + at % 40)
    elif data:
        data[at] = 0 if kind == "zero" else data[at] ^ (1 << at % 8)
    path.write_bytes(data)


class Disk:
    """A tier, the chains that are stored in it, and what a router knows of it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.memory = Memory(slots=16, block_bytes=64)
        self.chains = {name: self.memory.chain(name, 8) for name in NAMES}
        self.events: list[KvEvent] = []

    async def open(self) -> None:
        self.tier = await DiskTier.open(
            self.folder, self.memory.region, SLOTS * SLOT_BYTES, "layout", ManualClock()
        )
        self.events = self.tier.snapshot_events()

    async def store(self, name: str, first: int, count: int) -> None:
        await self.tier.store(self.memory.outgoing(self.chains[name], first, first + count))

    async def load(self, name: str, first: int, count: int) -> None:
        chain: Chain = self.chains[name]
        expected = count_held(self.tier, chain.hashes[first : first + count])
        if expected:
            await load(self.tier, self.memory, chain, first)

    async def lost_owner(self, name: str) -> None:
        blocks = self.memory.outgoing(self.chains[name], 0, 2)
        for block in blocks:
            self.memory.region.generations[block.slot] += 1
            self.memory.region.slot(block.slot)[:] = b"\xaa" * 64
        assert await self.tier.store(blocks) == 0

    async def restart(self, damaged: list[tuple[str, str, float]]) -> None:
        await self.tier.close()
        for name, kind, where in damaged:
            if (self.tier.folder / name).exists():
                damage(self.tier.folder, name, kind, where)
        await self.open()
        await self.tier._tasks.join()

    async def clear(self) -> None:
        self.tier.clear()
        assert self.tier.blocks == 0
        self.tier.take_events()
        self.events = []

    def check(self) -> None:
        tier = self.tier
        self.events += tier.take_events()
        held = held_blocks(self.events, "disk")
        assert held == held_blocks(tier.snapshot_events(), "disk")
        assert len(held) == tier.blocks <= SLOTS
        assert all(tier.holds(block_hash) for block_hash in held)
        check_slots(tier.slots)
        assert tier.problem == ""


@settings(max_examples=60, deadline=None)
@given(st.lists(operations, max_size=12))
def test_no_order_of_operations_and_damages_gives_a_wrong_block(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    async def run(folder: str) -> None:
        disk = Disk(folder)
        await disk.open()
        for name, *arguments in steps:
            await getattr(disk, name)(*arguments)
            disk.check()
        await disk.tier.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))


@settings(max_examples=60, deadline=None)
@given(st.lists(damages, min_size=1, max_size=6))
def test_every_damage_of_full_files_is_noticed(damaged: list[tuple[str, str, float]]) -> None:
    async def run(folder: str) -> None:
        disk = Disk(folder)
        await disk.open()
        await disk.store("a", 0, 4)
        await disk.store("b", 0, 2)
        await disk.restart(damaged)
        disk.check()
        await disk.load("b", 0, 2)
        for _ in range(5):  # each pass finds a damaged block at most, which the next one stores
            await disk.load("a", 0, 4)
            await disk.store("a", 0, 4)
            disk.check()
        assert await load(disk.tier, disk.memory, disk.memory.chain("a", 4)) == 4
        await disk.tier.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(folder))
