"""Tiers of simulated engines: their copies take time, and move nothing unless there is memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.values import EngineInfo, Tier
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.tiers.copies import CopyLink, TimedCopies
from dynamo.inference.tiers.kv_tiers import OpenedTiers
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.resident_blocks import ResidentBlocks

_Parts = tuple[ResidentBlocks, CopyLink, CopyLink, dict[int, bytes]]


class SimulatedTier(msgspec.Struct, frozen=True):
    """A tier of `blocks` that loads and stores at `bytes_per_s` each. Engines have one each, except
    that of the tier `shared`, which is one for all."""

    name: Tier
    blocks: int
    bytes_per_s: float


class SimulatedTiers:
    """Opens the tiers of all engines of a simulated cluster."""

    def __init__(self, tiers: Sequence[SimulatedTier], clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
        self._shared: _Parts | None = None

    async def open(self, engine: EngineCore, info: EngineInfo) -> OpenedTiers:
        """Return the tiers of one engine (an `OpenTiers`)."""
        del info
        region = engine.runner.region
        assert region is not None  # noqa: S101 - engines with simulated tiers have one
        tiers = []
        for tier in self._tiers:
            resident, loads, stores, contents = self._parts(tier)
            tiers.append(
                MemoryTier(
                    resident,
                    TimedCopies(region, loads, stores, contents, engine.catch_up),
                    block_bytes=region.slot_bytes,
                    source_generations=region.generations,
                    exclusive=tier is self._tiers[0] and tier.name != "shared",
                )
            )
        return OpenedTiers(tiers)

    def _parts(self, tier: SimulatedTier) -> _Parts:
        """Return the blocks of a tier and its links for loads and stores, and its bytes."""
        if tier.name == "shared" and self._shared is not None:
            return self._shared
        clock, bytes_per_s = self._clock, tier.bytes_per_s
        links = CopyLink(clock, bytes_per_s), CopyLink(clock, bytes_per_s)
        contents: dict[int, bytes] = {}
        parts = ResidentBlocks(tier.name, tier.blocks, clock), *links, contents
        if tier.name == "shared":
            self._shared = parts
        return parts
