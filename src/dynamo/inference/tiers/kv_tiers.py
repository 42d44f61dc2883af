"""`KvTiers`: the tiers below the blocks of one engine.

Blocks go down ahead of their eviction, in the background. A prompt that the engine does not have
and a tier does becomes an arriving sequence, if loading is predicted to be quicker than computing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from dynamo.core.errors import TransferFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import BlocksRemoved, EngineInfo, KvEvent, TierLoad
from dynamo.inference.engine_tiers import EngineTiers
from dynamo.inference.kv_source import ArrivalCounters, KvSource
from dynamo.inference.model_runner import StepPlan
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.sequence import EngineSequence, TokenContent
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.offload import Offload
from dynamo.inference.tiers.tier import KvTier
from dynamo.inference.tiers.tier_source import (
    LoadRun,
    TierSource,
    find_runs,
    load_within_deadline,
    useful_runs,
)

log = logging.getLogger(__name__)

MAX_PROMPTS: Final = 32
"""The first so many waiting prompts are looked at."""
HOST_SHARE: Final = 2
"""The inverse of the share of host memory that the blocks of waiting prompts may take."""

FindRuns = Callable[[EngineSequence], Sequence[LoadRun]]
"""Returns the blocks of a waiting sequence that are worth loading."""


class Prefetcher:
    """Loads blocks of waiting prompts from slow tiers into host memory, if that is predicted to be
    quicker than to compute them. Serves the sequences of one engine in order, one at a time."""

    def __init__(self, engine: EngineCore, target: MemoryTier, find_runs: FindRuns) -> None:
        self._engine = engine
        self._target = target
        self._find_runs = find_runs
        self._blocks: dict[EngineSequence, int] = {}
        self._current: EngineSequence | None = None
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look at the waiting sequences."""
        self._wake.set()

    def is_loading(self, sequence: EngineSequence) -> bool:
        """Whether blocks of this sequence are on their way: a second load would not be quicker."""
        return sequence is self._current

    async def run(self) -> None:
        """Load until cancelled."""
        while True:
            self._wake.clear()
            while (sequence := self._next()) is not None:
                self._blocks[sequence] = 0
                runs = self._find_runs(sequence)
                self._keep(sequence, runs)
                for run in runs:
                    if run.tier is not self._target:
                        await self._load(sequence, run)
            await self._wake.wait()

    def _next(self) -> EngineSequence | None:
        """Return the first waiting sequence that was not looked at, if its blocks have room."""
        waiting = [*islice(self._engine.scheduler.waiting, MAX_PROMPTS)]
        self._blocks = {each: self._blocks[each] for each in waiting if each in self._blocks}
        if sum(self._blocks.values()) >= self._target.capacity_blocks // HOST_SHARE:
            return None
        return next((sequence for sequence in waiting if sequence not in self._blocks), None)

    def _keep(self, sequence: EngineSequence, runs: Sequence[LoadRun]) -> None:
        """Make the blocks that are in host memory its last victims."""
        for run in reversed(runs):
            if run.tier is self._target:
                for block in reversed(range(run.first, run.first + run.blocks)):
                    self._target.slots.touch(sequence.content.hashes[block])

    async def _load(self, sequence: EngineSequence, run: LoadRun) -> None:
        room = self._target.capacity_blocks // HOST_SHARE - sum(self._blocks.values())
        part = LoadRun(run.tier, run.first, min(run.blocks, room))
        if part.blocks <= 0 or sequence not in self._engine.scheduler.waiting:
            return
        self._current = sequence
        self._blocks[sequence] += part.blocks
        try:
            await load_within_deadline(part, self._target.receive(sequence, part))
        except TransferFailed as error:
            fields = {"tier": run.tier.name, "error": str(error)}
            log.warning("KV blocks were not loaded ahead", extra={"fields": fields})
        finally:
            self._current = None
            self._engine.replan()  # the sequence can be admitted


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


class OpenedTiers(NamedTuple):
    """The tiers of an engine, the fastest first. `stores_all`: every block goes down to all of them
    ahead of its eviction, whether or not that is likely to save time."""

    tiers: Sequence[KvTier]
    stores_all: bool = False


OpenTiers = Callable[[EngineCore, EngineInfo], Awaitable[OpenedTiers]]
"""Opens the tiers of an engine that has started."""


class KvTiers(EngineTiers):
    """The tiers of one engine, fastest first. Used on the engine's loop."""

    tiers: Sequence[KvTier]
    can_load = True

    def __init__(self, engine: EngineCore, opened: OpenedTiers) -> None:
        self.tiers = tiers = tuple(opened.tiers)
        self.arrivals = ArrivalCounters()
        self._engine = engine
        self._pool = pool = engine.scheduler.pool
        self._offload = Offload(engine, pool, tiers, stores_all=opened.stores_all)
        self._announcements = TierAnnouncements(engine.publish_kv_events)
        self._background = BackgroundTasks()
        self._prefetcher = self._open_prefetcher()

    @classmethod
    async def open(cls, engine: EngineCore, open_tiers: OpenTiers, info: EngineInfo) -> EngineTiers:
        """Open the tiers of an engine. Raises `ConfigError`."""
        opened = await open_tiers(engine, info)
        return cls(engine, opened) if opened.tiers else EngineTiers()

    @property
    def storing(self) -> bool:
        return self._offload.storing

    async def close(self) -> None:
        await self._background.close()
        await self._offload.close()
        await self._announcements.close()
        for tier in self.tiers:
            await tier.close()

    def sources_for(
        self, sequence: EngineSequence, have_blocks: int, full: int
    ) -> Sequence[KvSource]:
        self._offload.on_prompt(full - have_blocks)
        runs = self._find_useful_runs(sequence, have_blocks, full)
        own = [source for source in sequence.sources if not isinstance(source, TierSource)]
        if not runs:
            return own
        source = TierSource(self.arrivals, sequence, runs)
        return [source] if source.loads.stop == full else [source, *own]

    def on_planned(self, plan: StepPlan | None) -> None:
        if self._prefetcher is not None and self._engine.scheduler.waiting:
            self._prefetcher.wake()
        self._offload.on_planned(plan)

    def take_events(self) -> list[KvEvent]:
        events = [event for tier in self.tiers for event in tier.take_events()]
        return events + self._announcements.take_events()

    def snapshot_events(self) -> list[KvEvent]:
        return self._announcements.snapshot_events(self.tiers)

    def report_load(self) -> tuple[TierLoad, ...]:
        return tuple(
            TierLoad(
                tier.name,
                _round(tier.predict_block_s()),
                _round(tier.predict_load_s(0)),
                blocks=tier.blocks,
                capacity_blocks=tier.capacity_blocks,
            )
            for tier in self.tiers
            if not tier.problem
        )

    def clear(self, name: str = "") -> int:
        count = 0
        for tier in self.tiers:
            if name in {"", tier.name}:
                self._offload.drop(tier)
                count += tier.blocks
                hashes = tier.clear()
                self._announcements.on_cleared(tier, hashes if name else ())
        return count

    def pin(self, tier: KvTier, content: TokenContent, ttl_s: float) -> str:
        """Keep the full blocks of a prompt in a tier that can pin, for `ttl_s` seconds (0: without
        end). Blocks that the engine has go down now. Returns the pin. Raises `InvalidRequest`."""
        full = len(content.tokens) // self._pool.block_tokens
        content.ensure_hashes(full)
        assert tier.pins is not None  # noqa: S101 - the caller has checked it
        pin = tier.pins.add(content.hashes[:full], ttl_s)
        hits = self._pool.match(content.hashes[:full], content.fingerprint)
        self._offload.store(tier, hits[::-1])
        return pin

    def is_prefetching(self, sequence: EngineSequence) -> bool:
        return self._prefetcher is not None and self._prefetcher.is_loading(sequence)

    def _find_useful_runs(
        self, sequence: EngineSequence, have_blocks: int, full: int
    ) -> Sequence[LoadRun]:
        """Return the blocks whose load saves time. Loads take place while the engine computes other
        prompts."""
        runs = find_runs(self.tiers, sequence.content.hashes[:full], have_blocks)
        if not runs:
            return ()
        token_s = self._engine.timing_learner.token_s
        backlog_s = self._engine.scheduler.prefill_tokens() * token_s
        return useful_runs(runs, self._pool.block_tokens * token_s, backlog_s)

    def _find_waiting_runs(self, sequence: EngineSequence) -> Sequence[LoadRun]:
        """Return the same for a sequence that is not admitted yet."""
        content, full = sequence.content, (sequence.length - 1) // self._pool.block_tokens
        content.ensure_hashes(full)
        hits = self._pool.match(content.hashes[:full], content.fingerprint)
        return self._find_useful_runs(sequence, len(hits), full)

    def _open_prefetcher(self) -> Prefetcher | None:
        """Start to load ahead, if there is host memory above slower tiers."""
        target = self.tiers[0]
        if not (self.tiers[1:] and isinstance(target, MemoryTier) and target.can_receive):
            return None
        prefetcher = Prefetcher(self._engine, target, self._find_waiting_runs)
        self._background.start(prefetcher.run(), "load KV blocks of waiting prompts")
        return prefetcher


def _round(seconds: float) -> float:
    return float(f"{seconds:.2g}")
