"""KV indexes by memory tier: device, host, disk and a store shared by all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dynamo.core.values import Tier
from dynamo.scheduling.index.block_runs import ANCHOR_BYTES, SHARD_COUNT
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex
from dynamo.scheduling.index.worker_bitsets import WorkerBitsets

LOWER_TIER_BUDGET_DIVISOR: Final = 2
"""The lower tiers take 1/n of the budget from the device index, once a worker reports one."""

LOWER_TIERS: Final[tuple[Tier, ...]] = ("host", "disk", "shared")
"""The tiers below the device, the fastest first."""

ANY_WORKER: Final = ""
"""The name that stands for workers that hold no block themselves, with the shared store."""


class TierRun(NamedTuple):
    """Consecutive blocks of a prompt in one tier."""

    tier: Tier
    blocks: int


TierRuns = Mapping[str, Sequence[TierRun]]
"""Worker -> where the blocks lie that follow its overlap on the device, in order of the prompt."""


def skip_blocks(runs: Sequence[TierRun], count: int) -> list[TierRun]:
    """Return the runs without their first `count` blocks."""
    rest = []
    for tier, blocks in runs:
        if blocks > count:
            rest.append(TierRun(tier, blocks - max(0, count)))
        count -= blocks
    return rest


class TieredIndex:
    """The blocks on the device, and those below under a part of the same budget. `lower` is None
    until a worker reports a block in a lower tier."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.device = KvIndex(budget_bytes)
        self.lower: LowerTierIndex | None = None

    @property
    def block_count(self) -> int:
        """The number of different blocks, counted once for each tier."""
        return self.device.block_count + (self.lower.block_count if self.lower else 0)

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory of all tiers."""
        return self.device.bytes_used + (self.lower.bytes_used if self.lower else 0)

    @property
    def evicted_blocks(self) -> int:
        """The number of blocks evicted to stay within the budget."""
        return self.device.evicted_blocks + (self.lower.evicted_blocks if self.lower else 0)

    def store(self, worker: str, tier: Tier, parent: int, hashes: Sequence[int]) -> None:
        """Add a chain of blocks that follows `parent` (0: the root)."""
        if tier == "device":
            self.device.store(worker, parent, hashes)
            return
        if self.lower is None:
            share = self.device.budget_bytes // LOWER_TIER_BUDGET_DIVISOR
            self.device.reduce_budget(share)
            self.lower = LowerTierIndex(share)
        self.lower.store(worker, tier, hashes)

    def remove(self, worker: str, tier: Tier, hashes: Sequence[int]) -> None:
        """Remove blocks from a tier of the worker."""
        if tier == "device":
            self.device.remove(worker, hashes)
        elif self.lower is not None:
            self.lower.remove(worker, tier, hashes)

    def remove_worker(self, worker: str) -> None:
        """Remove all blocks of the worker. Blocks in the shared store remain."""
        self.device.remove_worker(worker)
        if self.lower is not None:
            self.lower.remove_worker(worker)


class LowerTierIndex:
    """The holders of each block below the device, exact within a budget. Not thread-safe.

    A lower tier may hold a block without the blocks above it, since those may be on the device
    only. So a flat map leads from each block to the set of its workers. Blocks of the tier `shared`
    belong to no worker: the store keeps them after the death of the worker that stored them. Above
    the budget the blocks that were stored first are evicted.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._max_blocks = max(1, budget_bytes // ANCHOR_BYTES)
        self._shards: dict[Tier, list[dict[int, int]]] = {
            tier: [{} for _ in range(SHARD_COUNT)] for tier in LOWER_TIERS
        }
        self._tiers_in_use: list[Tier] = []
        self._bitsets = WorkerBitsets()
        self._store_bit = self._live = self._bitsets.get_or_assign_bit(ANY_WORKER)
        self._removed = 0
        self._swept = 0
        self._sweep_position = 0
        self.block_count = 0
        self.evicted_blocks = 0

    @property
    def bytes_used(self) -> int:
        """An upper bound of the memory of the index."""
        return self.block_count * ANCHOR_BYTES

    def store(self, worker: str, tier: Tier, hashes: Iterable[int]) -> None:
        """Add blocks to a tier of the worker."""
        bit = self._bit(worker, tier)
        if tier not in self._tiers_in_use:
            self._tiers_in_use = [
                each for each in LOWER_TIERS if each in {*self._tiers_in_use, tier}
            ]
        shards = self._shards[tier]
        for block in hashes:
            shard = shards[block & 255]
            holders = shard.get(block)
            if holders is None:
                shard[block] = bit
                self.block_count += 1
                if self.block_count > self._max_blocks:
                    self._evict_oldest(shard)
            elif not holders & bit:
                shard[block] = holders | bit
        self._sweep()

    def remove(self, worker: str, tier: Tier, hashes: Iterable[int]) -> None:
        """Remove blocks from a tier of the worker."""
        bit = self._bit(worker, tier)
        for block in hashes:
            shard = self._shards[tier][block & 255]
            holders = shard.get(block, 0)
            if holders == bit:
                del shard[block]
                self.block_count -= 1
            elif holders & bit:
                shard[block] = holders ^ bit
        self._sweep()

    def remove_worker(self, worker: str) -> None:
        """Remove a worker in constant time. Later updates remove its blocks step by step."""
        removed = self._bitsets.remove(worker)
        self._removed |= removed
        self._live &= ~removed

    def find_runs(
        self, hashes: Sequence[int], overlaps: Mapping[str, int]
    ) -> dict[str, list[TierRun]]:
        """Return worker -> where its blocks after `overlaps` (worker -> blocks on the device) lie,
        each in its fastest tier, up to the first block that no tier holds. The entry ANY_WORKER
        holds for all workers without an entry and an overlap."""
        starts = self._starts(overlaps)
        walk = _Walk(self._bitsets, self._tiers_in_use)
        shards_by_tier = [self._shards[tier] for tier in self._tiers_in_use]
        fastest = shards_by_tier[0] if shards_by_tier else ()
        any_holder = self._tiers_in_use.index("shared") if "shared" in self._tiers_in_use else -1
        alive, position, end = 0, 0, len(hashes)
        next_start = min(starts)
        while position < end and fastest:
            # `alive`: the workers whose run has begun, at the end of their blocks on the device.
            if position == next_start:
                alive |= starts.pop(position)
                next_start = min(starts, default=end)
            if not alive:
                position = next_start
                continue
            block = hashes[position]
            shard = block & 255
            if walk.fastest == alive == fastest[shard].get(block, 0) & alive and any_holder:
                position += 1  # all continue in the fastest tier
                continue
            # Each worker takes the block from its fastest tier; the shared tier has it for all.
            held, missing = [], alive
            for index, shards in enumerate(shards_by_tier):
                holders = shards[shard].get(block, 0)
                if holders and index == any_holder:
                    holders = missing
                holders &= missing
                missing ^= holders
                held.append(holders)
            # A worker without the block has ended its run.
            walk.advance(position, held)
            alive ^= missing
            position += 1
        walk.advance(min(position, end), [0] * len(shards_by_tier))
        return walk.runs

    def _starts(self, overlaps: Mapping[str, int]) -> dict[int, int]:
        """Return position -> the workers whose blocks on the device end there."""
        shared = "shared" in self._tiers_in_use
        starts: dict[int, int] = {}
        others = self._live
        for worker, overlap in overlaps.items():
            bit = self._bit(worker, "host") if shared else self._bitsets.get_bit(worker)
            starts[overlap] = starts.get(overlap, 0) | bit
            others &= ~bit
        starts[0] = starts.get(0, 0) | others
        return starts

    def _bit(self, worker: str, tier: Tier) -> int:
        if tier == "shared":
            return self._store_bit
        bit = self._bitsets.get_or_assign_bit(worker)
        self._live |= bit
        return bit

    def _evict_oldest(self, shard: dict[int, int]) -> None:
        del shard[next(iter(shard))]
        self.block_count -= 1
        self.evicted_blocks += 1

    def _sweep(self) -> None:
        """Remove the blocks of removed workers from one shard of each tier."""
        if not self._swept:
            if not self._removed:
                return
            self._swept, self._removed = self._removed, 0
        for shards in self._shards.values():
            shard = shards[self._sweep_position]
            for block in [block for block, holders in shard.items() if holders & self._swept]:
                shard[block] &= ~self._swept
                if not shard[block]:
                    del shard[block]
                    self.block_count -= 1
        self._sweep_position = (self._sweep_position + 1) % SHARD_COUNT
        if not self._sweep_position:
            self._bitsets.recycle_bits(self._swept)
            self._swept = 0


class _Walk:
    """The runs of all workers along one prompt, for the tiers in use, fastest first. `fastest`: the
    workers that have the present block in the first of these and in no other."""

    def __init__(self, bitsets: WorkerBitsets, tiers: Sequence[Tier]) -> None:
        self._bitsets = bitsets
        self._tiers = tiers
        self._held = [0] * len(tiers)
        self._begun: dict[str, int] = {}
        self.fastest = 0
        self.runs: dict[str, list[TierRun]] = {}

    def advance(self, position: int, held: list[int]) -> None:
        """Note which workers have the block at `position` in each tier."""
        if held == self._held:
            return
        members = self._bitsets.list_members
        changes = [*zip(self._tiers, self._held, held, strict=True)]
        for tier, before, after in changes:
            for worker in members(before & ~after):
                run = TierRun(tier, position - self._begun[worker])
                self.runs.setdefault(worker, []).append(run)
        for _, before, after in changes:
            for worker in members(after & ~before):
                self._begun[worker] = position
        self._held = held
        self.fastest = held[0]
