"""Conformance tests for every transfer backend."""
# ruff: noqa: S101

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest

from dynamo.communication.transfer import (
    MemoryRegion,
    RegionDescriptor,
    RegionPeer,
    SlotRead,
    TransferPlane,
)
from dynamo.core.errors import TransferFailed
from dynamo.core.tasks import BackgroundTasks, run_all

JoinTransfer = Callable[[], Awaitable[TransferPlane]]
LAYOUT = "layout"
SLOTS = 24
allocate_region: Callable[[int, int], MemoryRegion] = MemoryRegion.allocate
"""Makes the regions of a pair. Tests of another kind of memory replace it."""


def read_slot(region: MemoryRegion, slot: int) -> bytes:
    """Return the bytes of a slot."""
    with region.reading((slot,)) as (view,):
        return bytes(view)


def read_slots(region: MemoryRegion) -> list[bytes]:
    """Return the bytes of all slots."""
    return [read_slot(region, slot) for slot in range(region.slots)]


def write_slot(region: MemoryRegion, slot: int, data: bytes) -> None:
    """Write the bytes of a slot."""
    with region.writing((slot,)) as (view,):
        view[:] = data


def clear_slots(region: MemoryRegion) -> None:
    """Fill all slots with zeros."""
    for slot in range(region.slots):
        write_slot(region, slot, bytes(region.slot_bytes))


class TransferPair:
    """An owner and a reader of equal regions. Each slot of the owner has its own content."""

    def __init__(
        self, owner: TransferPlane, reader: TransferPlane, slots: int, slot_bytes: int
    ) -> None:
        rng = Random(7)
        self.owner = owner
        self.reader = reader
        self.source = allocate_region(slots, slot_bytes)
        self.target = allocate_region(slots, slot_bytes)
        for slot in range(slots):
            pattern = rng.randbytes(997)
            write_slot(self.source, slot, (pattern * (slot_bytes // 997 + 1))[:slot_bytes])
        self.descriptor: RegionDescriptor
        self.reader_descriptor: RegionDescriptor
        self.peer: RegionPeer

    def reads(self, sources: Sequence[int], targets: Sequence[int]) -> list[SlotRead]:
        """Return reads of the present generations."""
        generations = self.source.generations
        return [
            SlotRead(source, generations[source], target)
            for source, target in zip(sources, targets, strict=True)
        ]

    def has(self, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Whether the targets have the content of the sources."""
        pairs = zip(sources, targets, strict=True)
        return all(
            read_slot(self.source, source) == read_slot(self.target, target)
            for source, target in pairs
        )


@asynccontextmanager
async def open_pair(
    join: JoinTransfer, slot_bytes: int = 5000, slots: int = SLOTS
) -> AsyncIterator[TransferPair]:
    """Yield an owner, a reader and the reader's connection. Regions are closed after the planes."""
    pair = TransferPair(await join(), await join(), slots, slot_bytes)
    try:
        pair.descriptor = await pair.owner.expose(pair.source, LAYOUT)
        pair.reader_descriptor = await pair.reader.expose(pair.target, LAYOUT)
        pair.peer = await pair.reader.connect(pair.descriptor)
        yield pair
    finally:
        await pair.reader.close()
        await pair.owner.close()
        pair.source.close()
        pair.target.close()


class PullsConformance:
    """Tests of pulls that end by themselves. The fixture `join` opens one more plane."""

    @pytest.mark.parametrize("slot_bytes", [1, 64, 4097, 100_000])
    async def test_slots_arrive_whole(self, join: JoinTransfer, slot_bytes: int) -> None:
        rng = Random(slot_bytes)
        async with open_pair(join, slot_bytes) as pair:
            scattered = rng.sample(range(SLOTS), 9), rng.sample(range(SLOTS), 9)
            consecutive = range(3, 20), range(5, 22)
            gathered = (1, 2, 3, 9, 10, 11), (20, 4, 5, 6, 7, 0)
            for sources, targets in (scattered, consecutive, gathered, ((0,), (0,))):
                clear_slots(pair.target)
                await pair.peer.pull(pair.reads(sources, targets))
                assert pair.has(sources, targets)
                untouched = set(range(SLOTS)) - set(targets)
                assert all(read_slot(pair.target, n) == bytes(slot_bytes) for n in untouched)

    async def test_slots_larger_than_a_piece_arrive_whole(self, join: JoinTransfer) -> None:
        async with open_pair(join, slot_bytes=9_000_000, slots=3) as pair:
            await pair.peer.pull(pair.reads((2, 0), (0, 1)))
            assert pair.has((2, 0), (0, 1))

    async def test_no_slots_are_no_pull(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            await pair.peer.pull([])

    async def test_a_descriptor_survives_the_instance_record(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            record = msgspec.json.encode({"transfer": msgspec.to_builtins(pair.descriptor)})
            assert len(record) < 400
            capabilities = msgspec.json.decode(record)
            copy = msgspec.convert(capabilities["transfer"], RegionDescriptor)
            assert copy == pair.descriptor
            peer = await pair.reader.connect(copy)
            await peer.pull(pair.reads((4,), (5,)))
            assert pair.has((4,), (5,))

    async def test_concurrent_pulls_do_not_mix(self, join: JoinTransfer) -> None:
        async with open_pair(join, 50_000) as pair:
            targets = Random(1).sample(range(SLOTS), SLOTS)
            await run_all(
                *(pair.peer.pull(pair.reads((slot,), (targets[slot],))) for slot in range(SLOTS))
            )
            assert pair.has(range(SLOTS), targets)

    async def test_both_ends_can_pull(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            back = await pair.owner.connect(pair.reader_descriptor)
            await run_all(pair.peer.pull(pair.reads((3,), (3,))), back.pull([SlotRead(9, 0, 10)]))
            assert pair.has((3,), (3,))
            assert read_slot(pair.source, 10) == read_slot(pair.target, 9)

    async def test_a_larger_pull_takes_longer(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            await pair.peer.pull(pair.reads((3,), (3,)))
            assert pair.peer.predict_s(1 << 30) >= pair.peer.predict_s(1 << 20) >= 0


class RefusedPullsConformance:
    """Tests of pulls that must fail."""

    async def test_another_generation_is_stale(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            reads = pair.reads((1, 2, 3), (1, 2, 3))
            pair.source.generations[2] += 1
            for _ in range(5):  # a stale block is no fault of the peer: it is still asked
                await _fails(pair.peer, reads, "stale")
            assert pair.peer.available
            await pair.peer.pull(pair.reads((1, 2, 3), (1, 2, 3)))
            assert pair.has((1, 2, 3), (1, 2, 3))

    async def test_a_reused_slot_never_passes_for_the_former_one(self, join: JoinTransfer) -> None:
        async with open_pair(join, 300_000) as pair, BackgroundTasks() as tasks:
            complete: dict[int, int] = {}

            async def reuse() -> None:
                rng = Random(3)
                while True:
                    slot = rng.randrange(4)
                    complete.pop(slot, None)
                    pair.source.generations[slot] += 1
                    content = bytes([pair.source.generations[slot] % 251]) * 30_000
                    with pair.source.writing((slot,)) as (memory,):
                        for start in range(0, 300_000, 30_000):
                            memory[start : start + 30_000] = content
                            await asyncio.sleep(0)
                    complete[slot] = pair.source.generations[slot]
                    await asyncio.sleep(0.001 * rng.random())

            tasks.start(reuse())
            good = stale = 0
            while not good or good + stale < 60:
                await asyncio.sleep(0.0005)
                wanted = dict(complete)
                reads = [SlotRead(slot, number, slot) for slot, number in wanted.items()]
                try:
                    await pair.peer.pull(reads)
                except TransferFailed as error:
                    stale += error.reason in {"stale", "checksum"}
                    continue
                good += 1
                for slot, number in wanted.items():
                    assert read_slot(pair.target, slot) == bytes([number % 251]) * 300_000

    async def test_other_layouts_are_refused(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            other = msgspec.structs.replace(pair.descriptor, layout="another model")
            with pytest.raises(TransferFailed, match="another model") as caught:
                await pair.reader.connect(other)
            assert caught.value.reason == "refused"
            assert caught.value.hint
            larger = msgspec.structs.replace(pair.descriptor, slot_bytes=5001)
            with pytest.raises(TransferFailed, match="5001"):
                await pair.reader.connect(larger)

    async def test_unknown_slots_are_refused(self, join: JoinTransfer) -> None:
        async with open_pair(join) as pair:
            for source, target in ((SLOTS, 0), (0, SLOTS), (-1, 0), (0, -1)):
                await _fails(pair.peer, [SlotRead(source, 0, target)], "refused")
            await pair.peer.pull(pair.reads((1,), (1,)))


class InterruptedPullsConformance:
    """Tests of pulls that are cut off."""

    async def test_after_a_cancellation_nobody_writes(self, join: JoinTransfer) -> None:
        rng = Random(5)
        async with open_pair(join, 1_000_000) as pair, BackgroundTasks() as tasks:
            slots = range(SLOTS)
            for attempt in range(12):
                clear_slots(pair.target)
                pull = tasks.start(pair.peer.pull(pair.reads(slots, slots)))
                await asyncio.sleep(0.002 * attempt * rng.random())
                pull.cancel()
                await asyncio.wait([pull])
                before = read_slots(pair.target)
                await asyncio.sleep(0.003)
                assert read_slots(pair.target) == before
            await pair.peer.pull(pair.reads(slots, slots))
            assert pair.has(slots, slots)

    async def test_pulls_fail_when_the_owner_closes(self, join: JoinTransfer) -> None:
        async with open_pair(join, 1_000_000) as pair, BackgroundTasks() as tasks:
            slots = range(SLOTS)
            pull = tasks.start(pair.peer.pull(pair.reads(slots, slots)))
            await asyncio.sleep(0)
            await pair.owner.close()
            await asyncio.wait([pull])
            error = pull.exception()
            if error is None:
                assert pair.has(slots, slots)
            else:
                assert isinstance(error, TransferFailed)
                assert error.reason == "gone"
            await asyncio.sleep(0.01)  # the end of the connection arrives
            await _fails(pair.peer, pair.reads((1,), (1,)), "gone")
            with pytest.raises(TransferFailed):
                await pair.reader.connect(pair.descriptor)

    async def test_a_region_closed_early_stays_until_its_plane_closes(
        self, join: JoinTransfer
    ) -> None:
        async with open_pair(join, 1_000_000) as pair, BackgroundTasks() as tasks:
            slots = range(SLOTS)
            pull = tasks.start(pair.peer.pull(pair.reads(slots, slots)))
            await asyncio.sleep(0)
            pair.target.close()
            pair.source.close()
            await pull
            assert pair.has(slots, slots)
            await pair.reader.close()
            assert pair.target.fd == -1

    async def test_a_closed_peer_is_not_read(self, join: JoinTransfer) -> None:
        async with open_pair(join, 1_000_000) as pair, BackgroundTasks() as tasks:
            slots = range(SLOTS)
            pull = tasks.start(pair.peer.pull(pair.reads(slots, slots)))
            await asyncio.sleep(0)
            await pair.peer.close()
            await asyncio.wait([pull])
            before = read_slots(pair.target)
            await asyncio.sleep(0.003)
            assert read_slots(pair.target) == before
            await _fails(pair.peer, pair.reads((1,), (1,)), "gone")
            again = await pair.reader.connect(pair.descriptor)
            await again.pull(pair.reads(slots, slots))
            assert pair.has(slots, slots)


class TransferConformance(PullsConformance, RefusedPullsConformance, InterruptedPullsConformance):
    """All tests of a transfer backend. The fixture `join` opens one more plane."""


async def _fails(peer: RegionPeer, reads: Sequence[SlotRead], reason: str) -> None:
    with pytest.raises(TransferFailed) as caught:
        await peer.pull(reads)
    assert caught.value.reason == reason
