"""Blocks below the device's memory: host, disk, and a store that every worker reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.core.values import Tier
from dynamo.scheduling.index.kv_index import DEFAULT_BUDGET_BYTES, KvIndex

LOWER_TIERS: Final[tuple[Tier, ...]] = ("host", "disk", "shared")
LOWER_TIER_BUDGET_DIVISOR: Final = 8
"""Each lower tier in use takes an eighth of the budget from the device's index."""


class LowerTierBlocks(msgspec.Struct, frozen=True):
    """Blocks of a prompt that follow what the device holds, by the fastest tier that has each."""

    host: int = 0
    disk: int = 0
    shared: int = 0


class TieredIndex:
    """One index a tier, under one budget; those below the device come into being when used."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self.tiers: dict[Tier, KvIndex] = {"device": KvIndex(budget_bytes)}
        self.device = self.tiers["device"]

    def get_or_create_tier(self, name: Tier) -> KvIndex:
        """The index of one tier."""
        found = self.tiers.get(name)
        if found is None:
            share = self._budget_bytes // LOWER_TIER_BUDGET_DIVISOR
            self.tiers[name] = found = KvIndex(share)
            self.device.budget_bytes -= share
        return found

    def remove_worker(self, worker: str) -> None:
        """The worker is no more, or holds nothing, in no tier."""
        for index in self.tiers.values():
            index.remove_worker(worker)

    def find_lower_tier_blocks(
        self, hashes: Sequence[int], device: Mapping[str, int]
    ) -> dict[str, LowerTierBlocks]:
        """For every worker with blocks of lower tiers right after its overlap on the device
        (`device`: worker -> blocks): how many, in order, until the first that nobody has."""
        lower = {tier: self.tiers[tier] for tier in LOWER_TIERS if tier in self.tiers}
        if not lower:
            return {}
        workers = {name for index in lower.values() for name in index.workers} | device.keys()
        places = {tier: _held_positions(index, hashes) for tier, index in lower.items()}
        shared = 0
        for held in places.pop("shared", {}).values():
            shared |= held
        found = {}
        for worker in workers:
            own: dict[str, int] = {tier: held.get(worker, 0) for tier, held in places.items()}
            counts = _count_blocks_per_tier({**own, "shared": shared}, device.get(worker, 0))
            if counts:
                found[worker] = LowerTierBlocks(**counts)
        return found


def _held_positions(index: KvIndex, hashes: Sequence[int]) -> dict[str, int]:
    """worker -> which of `hashes` it holds, a bit each."""
    found: dict[str, int] = {}
    for start, depths in index.iter_spans(hashes):
        for worker, end in depths.items():
            found[worker] = found.get(worker, 0) | (1 << end) - (1 << start)
    return found


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
