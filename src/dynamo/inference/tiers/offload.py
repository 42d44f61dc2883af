"""`Offload`: stores blocks of one engine in the tiers below, ahead of their eviction.

`TierWriter` stores the blocks for one tier, in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

from dynamo.core.hashing import IDENTITY_BYTES
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.block import Block
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.model_runner import PredictableModelRunner, StepPlan
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.tier import KvTier, TierBlock

log = logging.getLogger(__name__)

BATCH_BLOCKS: Final = 32
"""So many blocks go down at once."""
MAX_WAITING: Final = 4096
AHEAD_SHARE = 8
"""The inverse of the share of an engine's blocks that is free or in a tier, ready for eviction."""
MIN_AHEAD = 16
PEAK_FACTOR = 1.25
"""Times the blocks of the longest recent prompt, if that is more."""
PEAK_TURNOVERS = 4.0
"""The longest prompt loses weight while so many times the engine's blocks are evicted."""
MAX_LOAD_FACTOR = 2.0
"""A load that takes at most so many times as long as computing can pay: it takes place while the
engine computes other prompts."""
GROWTH_BLOCKS = 4
"""With fewer blocks left for each running sequence, the last one is about to be preempted."""
MIN_PREEMPTIBLE = 2
"""A sequence that runs alone is not preempted."""


class TierWriter:
    """The blocks that wait for one tier. A slow tier does not delay the others: a block that waits
    too long has another generation when its turn comes, and is left out."""

    def __init__(self, tier: KvTier, on_stored: Callable[[], None]) -> None:
        self.tier = tier
        self._on_stored = on_stored
        self._waiting: dict[int, TierBlock] = {}
        self._is_storing = False
        self._work_arrived = asyncio.Event()

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way down."""
        return bool(self._waiting) or self._is_storing

    def replace(self, blocks: Sequence[TierBlock]) -> None:
        """Store these blocks instead of those that still wait."""
        self._waiting = {block.block_hash: block for block in blocks}
        self._work_arrived.set()

    def add(self, blocks: Sequence[TierBlock]) -> None:
        """Store these blocks, too, as long as not too many wait."""
        for block in blocks[: MAX_WAITING - len(self._waiting)]:
            self._waiting[block.block_hash] = block
        self._work_arrived.set()

    async def run(self) -> None:
        """Store what waits, until cancelled."""
        while True:
            self._work_arrived.clear()
            while self._waiting:
                batch = [*islice(self._waiting.values(), BATCH_BLOCKS)]
                for block in batch:
                    del self._waiting[block.block_hash]
                self._is_storing = True
                try:
                    await self.tier.store(batch)
                except Exception:  # tiers should not raise; the next blocks may be stored
                    log.exception("a KV tier failed", extra={"fields": {"tier": self.tier.name}})
                finally:
                    self._is_storing = False
                self._on_stored()
            await self._work_arrived.wait()


class Offload:
    """Chooses the blocks that go down, for each tier."""

    def __init__(
        self, engine: EngineCore, pool: BlockPool, tiers: Sequence[KvTier], *, stores_all: bool
    ) -> None:
        """`stores_all`: every block goes down to all tiers, whether or not that saves time."""
        self._stores_all = stores_all
        self._engine = engine
        self._pool = pool
        self._first = tiers[0]
        self._skips_steps = isinstance(engine.runner, PredictableModelRunner)
        self._min_ahead = max(MIN_AHEAD, pool.num_blocks // AHEAD_SHARE)
        self._peak = 0.0
        self._evictions = 0
        self._registered = -pool.num_blocks
        self._evictable = pool.num_blocks
        self._parked = (0, 0)
        self._writers = {tier: TierWriter(tier, engine.publish_kv_events) for tier in tiers}
        self._lower_writers = [self._writers[tier] for tier in tiers if tier.name != "host"]
        self._host_writers = [self._writers[tier] for tier in tiers if tier.name == "host"]
        self._background = BackgroundTasks()
        for tier, writer in self._writers.items():
            self._background.start(writer.run(), f"KV offload to {tier.name}")

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way down."""
        return any(writer.storing for writer in self._writers.values())

    async def close(self) -> None:
        """End the stores in flight."""
        await self._background.close()

    def drop(self, tier: KvTier) -> None:
        """Forget the blocks that wait for a tier."""
        self._writers[tier].replace(())

    def store(self, tier: KvTier, blocks: Sequence[Block]) -> None:
        """Let cached blocks go down to a tier that lacks them."""
        self._writers[tier].add(self._describe_missing(tier, blocks))

    def on_prompt(self, blocks: int) -> None:
        """Note that a prompt needs so many blocks: they are taken in one step."""
        self._peak = max(self._peak, blocks)

    def on_planned(self, plan: StepPlan | None) -> None:
        """Choose the blocks that go down next. Where virtual time may skip steps that only decode,
        they are left out."""
        if self._skips_steps and not (plan is None or plan.new_tokens or plan.released):
            return
        if self._lower_writers and plan is not None and plan.new_tokens:
            self._store_reused(plan)
        if writers := self._eviction_writers():
            self._store_victims(writers)
            self._store_preempted(writers)

    def _store_victims(self, writers: Collection[TierWriter]) -> None:
        """Store the blocks that are evicted next."""
        pool = self._pool
        turnover = (pool.evictions - self._evictions) / pool.num_blocks
        self._evictions = pool.evictions
        self._peak *= max(0.0, 1.0 - turnover / PEAK_TURNOVERS)
        ahead = min(pool.num_blocks, max(self._min_ahead, int(self._peak * PEAK_FACTOR)))
        missing = ahead - pool.free
        if missing <= 0 or not self._has_changed(ahead // 4):
            return
        victims = list(pool.next_victims(missing))
        if len(victims) < missing:
            victims += self._running_blocks(missing - len(victims))
        for writer in writers:
            if chosen := self._describe_missing(writer.tier, victims):
                writer.replace(chosen)
        self._parked = (0, 0)

    def _store_preempted(self, writers: Collection[TierWriter]) -> None:
        """Store the blocks of the sequence that is preempted next, if few blocks are left. When the
        sequence runs again, it can load them instead of computing."""
        running = self._engine.scheduler.running
        if len(running) < MIN_PREEMPTIBLE or self._pool.available > GROWTH_BLOCKS * len(running):
            return
        last = running[-1]
        state = (last.arrival, last.registered_blocks)
        if state == self._parked:
            return
        self._parked = state
        blocks = [block for block in last.blocks[: last.registered_blocks] if block.cached]
        for writer in writers:
            writer.add(self._describe_missing(writer.tier, blocks[::-1]))

    def _has_changed(self, blocks: int) -> bool:
        """Whether `blocks` were registered or became evictable since this was last true."""
        pool = self._pool
        evictable = pool.available - pool.free
        self._evictable = min(self._evictable, evictable)
        if max(pool.registrations - self._registered, evictable - self._evictable) < blocks:
            return False
        self._registered, self._evictable = pool.registrations, evictable
        return True

    def _eviction_writers(self) -> Collection[TierWriter]:
        """Return the writers of the tiers that take blocks ahead of their eviction. With policy lru
        these are all. Else host memory takes them, unless its loads take much longer than
        computing."""
        if self._stores_all:
            return self._writers.values()
        limit_s = MAX_LOAD_FACTOR * self._pool.block_tokens * self._engine.timing_learner.token_s
        return [each for each in self._host_writers if each.tier.predict_block_s() < limit_s]

    def _running_blocks(self, count: int) -> Sequence[Block]:
        """Return cached blocks of running sequences, which can be evicted soon after their end."""
        blocks: list[Block] = []
        for sequence in self._engine.scheduler.running:
            if len(blocks) >= count:
                break
            blocks += reversed(sequence.blocks[: sequence.registered_blocks])
        return [block for block in blocks[:count] if block.cached]

    def _store_reused(self, plan: StepPlan) -> None:
        """Let the blocks that this step reuses go down to the tiers below host memory. Each block
        does so once, with its second use."""
        for chunk in plan.chunks:
            if not chunk.load_block_ids:
                continue
            blocks = chunk.sequence.blocks[: len(chunk.load_block_ids)]
            reused = [block for block in blocks if block.cached and self._is_reused(block)]
            for writer in self._lower_writers:
                writer.add(self._describe_missing(writer.tier, reused))

    def _is_reused(self, block: Block) -> bool:
        """Whether a sequence after the first one uses a block, also after it came back."""
        first = self._first
        if isinstance(first, MemoryTier) and first.holds(block.block_hash):
            return bool(block.hits or first.slots.hits(block.block_hash))
        return block.hits > 0

    def _describe_missing(self, tier: KvTier, blocks: Sequence[Block]) -> list[TierBlock]:
        """Return the blocks that a tier does not have, with their content in the region. Host
        memory evicts those that it has last."""
        if isinstance(tier, MemoryTier):
            missing = [block for block in blocks if not tier.slots.touch(block.block_hash)]
        else:
            missing = [block for block in blocks if not tier.holds(block.block_hash)]
        if missing:
            self._engine.runner.export_cached(missing)
        return [self._describe(block) for block in missing]

    def _describe(self, block: Block) -> TierBlock:
        region = self._engine.runner.region
        assert region is not None  # noqa: S101 - tiers are opened for engines with a region
        generation = region.generations[block.id]
        tokens = block.fingerprint.to_bytes(IDENTITY_BYTES)
        return TierBlock(
            block.block_hash, block.parent_hash, block.id, generation, tokens, block.hits
        )
