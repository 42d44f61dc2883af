"""A memory tier of a fast replay, which holds units of the trace instead of blocks, and what a
worker stores there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from dynamo.core.clock import Clock
from dynamo.inference.block_pool import KvEventBuffer
from dynamo.inference.tiers.copies import CopyLink
from dynamo.inference.tiers.offload import BATCH_BLOCKS, MAX_WAITING
from dynamo.inference.tiers.tier import TierCounters
from dynamo.operations.replay.workers import SimulatedTier

Unit = tuple[int, int]
"""The key of a unit, negative if nobody finds it, and its blocks."""


class TierUnits:
    """The units in a tier, each with its blocks, the next victim first. Engines may share it.

    `reading`: units that are being loaded, which stay. A unit whose key is negative is found by
    nobody. `exclusive`: a unit that was loaded is the next victim. `publishes`: `events` is used.
    """

    def __init__(
        self, tier: SimulatedTier, clock: Clock, *, exclusive: bool, publishes: bool
    ) -> None:
        self.tier = tier
        self.loads = CopyLink(clock, tier.bytes_per_s)
        self.stores = CopyLink(clock, tier.bytes_per_s)
        self.units: OrderedDict[int, int] = OrderedDict()
        self.reading: Counter[int] = Counter()
        self.events = KvEventBuffer(tier.name)
        self.free = tier.blocks
        self.new_key = count(-1, -1).__next__
        self._exclusive, self._publishes = exclusive, publishes

    def touch(self, key: int) -> bool:
        """Make a unit the last victim. Returns whether it is here."""
        if key not in self.units:
            return False
        self.units.move_to_end(key)
        return True

    def reserve(self, blocks: int) -> int:
        """Make room for a unit of so many blocks. Returns how many were evicted; -1: no room."""
        evicted, units = 0, self.units
        while self.free < blocks:
            victim = next((key for key in units if key not in self.reading), None)
            if victim is None:
                return -1
            evicted += units[victim]
            self.free += units.pop(victim)
            if self._publishes and victim >= 0:
                self.events.add_removed(victim)
        self.free -= blocks
        return evicted

    def add(self, key: int, blocks: int) -> bool:
        """Put a unit into its reserved room. False: it is here already."""
        if key in self.units:
            self.free += blocks
            return False
        self.units[key] = blocks
        return True

    def publish_added(self, keys: Sequence[int]) -> None:
        """Let the router know of new units."""
        if self._publishes:
            for key in keys:
                self.events.add_stored(0, key)

    def begin_load(self, keys: Sequence[int]) -> None:
        """Keep units until `end_load`."""
        self.reading.update(keys)

    def end_load(self, keys: Sequence[int]) -> None:
        """Note that the units of a chain were loaded."""
        for key in reversed(keys):
            self.reading[key] -= 1
            if not self.reading[key]:
                del self.reading[key]
            self.units.move_to_end(key, last=not self._exclusive)


class UnitWriter:
    """The units that wait for one tier, which are stored in batches of `block_bytes` a block.
    `on_stored` is called after each."""

    def __init__(
        self, tier: TierUnits, clock: Clock, block_bytes: int, on_stored: Callable[[], None]
    ) -> None:
        self.tier, self.counters = tier, TierCounters()
        self._clock, self._block_bytes, self._on_stored = clock, block_bytes, on_stored
        self._waiting: dict[int, int] = {}
        self._copying: dict[int, int] = {}
        self._dropped: set[int] = set()

    def replace(self, units: Iterable[Unit]) -> None:
        """Store units that the tier lacks instead of those that still wait."""
        if missing := self._find_missing(units):
            self._waiting = missing
            self._store_next()

    def add(self, units: Iterable[Unit]) -> None:
        """Store units that the tier lacks, too, as long as not too many blocks wait."""
        missing = self._find_missing(units)
        if missing:
            left = MAX_WAITING - sum(self._waiting.values())
            for key, blocks in missing.items():
                if left <= 0:
                    break
                self._waiting[key] = blocks
                left -= blocks
            self._store_next()

    def discard(self, keys: Iterable[int]) -> None:
        """Forget units that the worker has evicted before the end of their copies."""
        for key in keys:
            self._waiting.pop(key, None)
            if key in self._copying:
                self._dropped.add(key)

    def _find_missing(self, units: Iterable[Unit]) -> dict[int, int]:
        touch = self.tier.touch
        return {key: blocks for key, blocks in units if not touch(key)}

    def _store_next(self) -> None:
        tier, waiting = self.tier, self._waiting
        if self._copying:
            return
        batch, left = self._copying, BATCH_BLOCKS
        while waiting and left > 0:
            key = next(iter(waiting))
            blocks = waiting.pop(key)
            if key in tier.units or (evicted := tier.reserve(blocks)) < 0:
                continue
            self.counters.evicted_blocks += evicted
            batch[key] = blocks
            left -= blocks
        if batch:
            end_s = tier.stores.reserve(sum(batch.values()) * self._block_bytes)
            self._clock.call_at(end_s, self._on_copied)

    def _on_copied(self) -> None:
        tier, added = self.tier, []
        dropped, self._dropped = self._dropped, set()
        batch, self._copying = self._copying, {}
        for key, blocks in batch.items():
            if key in dropped:
                tier.free += blocks
            elif tier.add(key, blocks):
                self.counters.stored_blocks += blocks
                if key >= 0:
                    added.append(key)
        tier.publish_added(added[::-1])
        self._on_stored()
        self._store_next()
