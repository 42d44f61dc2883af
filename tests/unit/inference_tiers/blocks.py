"""Chains of blocks in a memory region whose content follows from their hash, for tests of tiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.errors import TransferFailed
from dynamo.core.hashing import block_hashes, prefix_identities, root_hash, root_identity
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.inference.tiers.disk import DiskTier
from dynamo.inference.tiers.remote import RemoteTier
from dynamo.inference.tiers.tier import KvTier, TierBlock
from dynamo.inference.tiers.tier_source import find_runs
from dynamo_conformance import transfer
from dynamo_conformance.transfer import read_slot, write_slot

BLOCK_TOKENS = 4
OpenDisk = Callable[..., Awaitable[DiskTier]]
OpenRemote = Callable[..., Awaitable[RemoteTier]]


class ManualClock(SystemClock):
    """A clock that a test advances. Sleepers do not wake."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:  # type: ignore[override]
        return self.time_s

    async def sleep_until(self, when: float) -> None:
        await asyncio.Event().wait()


class Chain:
    """A prompt of `blocks` blocks. Prompts of other names share nothing with it."""

    def __init__(self, name: str, blocks: int, block_bytes: int) -> None:
        tokens = pack_ids(list(range(blocks * BLOCK_TOKENS)))
        self.hashes = block_hashes(tokens, BLOCK_TOKENS, root_hash(name))
        self.identities = prefix_identities(tokens, BLOCK_TOKENS, root_identity(name))
        self.parents = [root_hash(name), *self.hashes]
        self.block_bytes = block_bytes

    def content(self, index: int) -> bytes:
        """Return the KV that block `index` stands for."""
        return random.Random(self.hashes[index]).randbytes(self.block_bytes)

    def block(self, index: int, slot: int, generation: int = 0) -> TierBlock:
        return TierBlock(
            self.hashes[index],
            self.parents[index],
            slot,
            generation,
            self.identities[index],
        )


class Memory:
    """A region whose slots a test fills with blocks and compares with them."""

    def __init__(self, slots: int = 64, block_bytes: int = 8192) -> None:
        self.region = transfer.allocate_region(slots, block_bytes)
        self.block_bytes = block_bytes
        self._next_slot = 0

    def chain(self, name: str, blocks: int) -> Chain:
        return Chain(name, blocks, self.block_bytes)

    def outgoing(self, chain: Chain, first: int = 0, end: int | None = None) -> list[TierBlock]:
        """Put blocks of a chain into slots and return them as blocks to store."""
        blocks = []
        for index in range(first, len(chain.hashes) if end is None else end):
            slot = self._take_slot()
            write_slot(self.region, slot, chain.content(index))
            blocks.append(chain.block(index, slot, self.region.generations[slot]))
        return blocks

    def incoming(self, chain: Chain, first: int = 0, end: int | None = None) -> list[TierBlock]:
        """Return blocks of a chain to load into slots that contain something else."""
        blocks = []
        for index in range(first, len(chain.hashes) if end is None else end):
            slot = self._take_slot()
            write_slot(self.region, slot, b"\xee" * self.block_bytes)
            blocks.append(chain.block(index, slot))
        return blocks

    def right(self, chain: Chain, blocks: Sequence[TierBlock], first: int = 0) -> bool:
        """Whether the slots of `blocks` contain the blocks of the chain from `first` on."""
        return all(
            read_slot(self.region, block.slot) == chain.content(first + index)
            for index, block in enumerate(blocks)
        )

    def _take_slot(self) -> int:
        slot = self._next_slot % self.region.slots
        self._next_slot += 1
        self.region.generations[slot] += 1
        return slot


def held_blocks(events: Sequence[KvEvent], tier: str) -> set[int]:
    """Return the hashes that a router knows after `events`. A removed block must be known."""
    held: set[int] = set()
    for event in events:
        assert isinstance(event, BlocksStored | BlocksRemoved)
        assert event.tier == tier
        if isinstance(event, BlocksStored):
            held.update(event.hashes)
        else:
            assert held >= set(event.hashes)
            held.difference_update(event.hashes)
    return held


def count_held(tier: KvTier, hashes: Sequence[int]) -> int:
    """Return how many of these blocks, from the first on, an engine would load."""
    return sum(run.blocks for run in find_runs([tier], hashes, 0))


async def load(tier: KvTier, memory: Memory, chain: Chain, first: int = 0) -> int:
    """Load a chain from `first` on. Returns how many blocks came, and checks each of them."""
    blocks = memory.incoming(chain, first)
    progress = [0]
    try:
        await tier.load(blocks, progress.append)
    except TransferFailed:
        assert progress[-1] < len(blocks)
    else:
        assert progress[-1] == len(blocks)
    assert progress == sorted(progress)
    assert memory.right(chain, blocks[: progress[-1]], first)
    return progress[-1]


def fail(error: OSError) -> Callable[..., Any]:
    """Return a function that raises an error like `error`."""

    def raise_error(*_: Any) -> Any:
        raise OSError(error.errno, error.strerror)

    return raise_error
