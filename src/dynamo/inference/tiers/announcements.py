"""`TierAnnouncements`: KV events of large changes, in slices that do not hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import BlocksRemoved, KvEvent
from dynamo.inference.tiers.tier import KvTier

SLICE_BLOCKS: Final = 2048
"""Blocks that are announced in one turn of the event loop."""
SNAPSHOT_BLOCKS: Final = 8 * SLICE_BLOCKS
"""A larger tier is left out of snapshots and announced after them."""


class TierAnnouncements:
    """Announces the blocks of large tiers to new listeners, and those of emptied tiers. Indexes may
    get a block twice."""

    def __init__(self, publish: Callable[[], None]) -> None:
        """`publish` lets the engine publish what `take_events` returns."""
        self._publish = publish
        self._events: list[KvEvent] = []
        self._background = BackgroundTasks()
        self._snapshots: dict[KvTier, asyncio.Task[None]] = {}

    def take_events(self) -> list[KvEvent]:
        """Return the announcements since the last call."""
        events, self._events = self._events, []
        return events

    def snapshot_events(self, tiers: Iterable[KvTier]) -> list[KvEvent]:
        """Return events that rebuild the present state of small tiers, and announce the blocks of
        large ones from now on."""
        events: list[KvEvent] = []
        for tier in tiers:
            if tier.blocks <= SNAPSHOT_BLOCKS:
                events += tier.snapshot_events()
            else:
                self._start_snapshot(tier)
        return events

    def on_cleared(self, tier: KvTier, hashes: Sequence[int]) -> None:
        """Announce the removal of these blocks, which an emptied tier returned. None, if an event
        for all tiers does so."""
        if task := self._snapshots.pop(tier, None):
            task.cancel()
        name = f"announce the removal of KV blocks in {tier.name}"
        self._background.start(self._announce(self._removed_slices(tier, hashes)), name)

    async def close(self) -> None:
        """Stop."""
        await self._background.close()

    def _start_snapshot(self, tier: KvTier) -> None:
        if task := self._snapshots.pop(tier, None):
            task.cancel()
        name = f"announce KV blocks in {tier.name}"
        self._snapshots[tier] = self._background.start(
            self._announce(self._stored_slices(tier)), name
        )

    async def _announce(self, slices: Iterator[Sequence[KvEvent]]) -> None:
        for events in slices:
            self._events += events
            self._publish()
            await asyncio.sleep(0)

    def _stored_slices(self, tier: KvTier) -> Iterator[Sequence[KvEvent]]:
        blocks = tier.held_blocks()
        while part := [*islice(blocks, SLICE_BLOCKS)]:
            yield tier.stored_events(part)

    def _removed_slices(self, tier: KvTier, hashes: Sequence[int]) -> Iterator[Sequence[KvEvent]]:
        for start in range(0, len(hashes), SLICE_BLOCKS):
            part = hashes[start : start + SLICE_BLOCKS]
            removed = tuple(block_hash for block_hash in part if not tier.holds(block_hash))
            yield [BlocksRemoved(removed, tier.name)] if removed else []
