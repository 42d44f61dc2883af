"""The memory tiers below one worker's device, as queues of loads in front of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import msgspec

from dynamo.core.load_choice import count_useful_runs
from dynamo.core.values import Tier, TierLoad
from dynamo.scheduling.index.tiered_index import TierRun


class BlockLoad(msgspec.Struct, frozen=True):
    """Blocks of one prompt that a worker would load. `parts`: consecutive blocks of one tier, in
    order of the prompt."""

    parts: tuple[TierRun, ...]

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(part.blocks for part in self.parts)

    def by_tier(self) -> dict[str, int]:
        """Return tier -> blocks to load."""
        blocks: dict[str, int] = {}
        for tier, count in self.parts:
            blocks[tier] = blocks.get(tier, 0) + count
        return blocks


class TierQueue(msgspec.Struct):
    """A tier of a worker: milliseconds to load a block, and when its loads in flight are done."""

    block_ms: float
    free_s: float


class TierQueues:
    """The tiers of one worker that can load blocks."""

    def __init__(self) -> None:
        self._queues: dict[Tier, TierQueue] = {}

    def update(self, tiers: Iterable[TierLoad], now: float) -> None:
        """Apply the worker's report. Requests placed since may still be on their way to the worker,
        so a queue does not become shorter than predicted."""
        before, self._queues = self._queues, {}
        for tier in tiers:
            known = before.get(tier.name)
            free_s = max(known.free_s if known else now, now + tier.queue_s)
            self._queues[tier.name] = TierQueue(tier.block_s * 1e3, free_s)

    def choose(self, runs: Sequence[TierRun], compute_ms: float, now: float) -> BlockLoad | None:
        """Return the leading `runs` whose load saves most, if any takes less time than computing
        its blocks, `compute_ms` each. The backlog, during which a load may take place, does not
        count. With it, a tier at 3 GB/s attracts prompts and delays the first tokens of the
        conversation trace by 1.6 %; without it, by 0.8 %."""
        known = takewhile(lambda run: run.tier in self._queues, runs)
        ready = ((part.blocks, ready_ms) for part, ready_ms in self._ready_times(known, now))
        count = count_useful_runs(ready, compute_ms)
        return BlockLoad(tuple(runs[:count])) if count else None

    def load_ms(self, load: BlockLoad, now: float) -> float:
        """Return the milliseconds until the blocks are on the device, behind the queues."""
        return max((ready_ms for _, ready_ms in self._ready_times(load.parts, now)), default=0.0)

    def reserve(self, load: BlockLoad, now: float) -> float:
        """Add the loads of a request that is sent to the worker now. Return `load_ms`."""
        ready_ms = 0.0
        for part, ready_ms in self._ready_times(load.parts, now):
            if queue := self._queues.get(part.tier):
                queue.free_s = now + ready_ms * 1e-3
        return ready_ms

    def _ready_times(self, runs: Iterable[TierRun], now: float) -> Iterator[tuple[TierRun, float]]:
        """Yield each run with the milliseconds until it is loaded, after the runs before it."""
        ready_ms = 0.0
        for run in runs:
            if queue := self._queues.get(run.tier):
                ready_ms = max(ready_ms, (queue.free_s - now) * 1e3) + run.blocks * queue.block_ms
            yield run, ready_ms
