"""KV indexes by memory tier: device, host, disk and a store shared by all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.core.values import Tier
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex

LOWER_TIERS: Final[tuple[Tier, ...]] = ("host", "disk", "shared")
LOWER_TIER_BUDGET_DIVISOR: Final = 8
"""Each lower tier in use takes 1/n of the budget from the device index."""


class LowerTierBlocks(msgspec.Struct, frozen=True):
    """The number of a prompt's blocks after those on the device, by the fastest tier of each."""

    host: int = 0
    disk: int = 0
    shared: int = 0


class TieredIndex:
    """An index for each tier under a common budget. Lower tiers are created on first use."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self.tiers: dict[Tier, KvIndex] = {"device": KvIndex(budget_bytes)}
        self.device = self.tiers["device"]

    def get_or_create_tier(self, name: Tier) -> KvIndex:
        """Return the index of a tier."""
        index = self.tiers.get(name)
        if index is None:
            share = self._budget_bytes // LOWER_TIER_BUDGET_DIVISOR
            self.tiers[name] = index = KvIndex(share)
            self.device.reduce_budget(share)
        return index

    def remove_worker(self, worker: str) -> None:
        """Remove all blocks of the worker from every tier."""
        for index in self.tiers.values():
            index.remove_worker(worker)

    def find_lower_tier_blocks(
        self, hashes: Sequence[int], device: Mapping[str, int]
    ) -> dict[str, LowerTierBlocks]:
        """Return worker -> blocks in lower tiers directly after its overlap on the device.

        `device` is worker -> overlap. Counting stops at the first block that no tier holds.
        """
        lower = {tier: self.tiers[tier] for tier in LOWER_TIERS if tier in self.tiers}
        if not lower:
            return {}
        workers = {name for index in lower.values() for name in index.workers} | device.keys()
        places = {tier: _held_positions(index, hashes) for tier, index in lower.items()}
        shared = 0
        for held in places.pop("shared", {}).values():
            shared |= held
        by_worker = {}
        for worker in workers:
            own: dict[str, int] = {tier: held.get(worker, 0) for tier, held in places.items()}
            counts = _count_blocks_per_tier({**own, "shared": shared}, device.get(worker, 0))
            if counts:
                by_worker[worker] = LowerTierBlocks(**counts)
        return by_worker


def _held_positions(index: KvIndex, hashes: Sequence[int]) -> dict[str, int]:
    """Return worker -> bitset of the positions in `hashes` that it holds."""
    positions: dict[str, int] = {}
    for start, depths in index.iter_spans(hashes):
        for worker, end in depths.items():
            positions[worker] = positions.get(worker, 0) | (1 << end) - (1 << start)
    return positions


def _count_blocks_per_tier(places: Mapping[str, int], start: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    while True:
        for tier, held in places.items():
            if held >> start & 1:
                counts[tier] = counts.get(tier, 0) + 1
                break
        else:
            return counts
        start += 1
