"""`Prefetcher`: loads blocks of waiting prompts from slow tiers into host memory.

A prompt waits while the engine has no room for it. Its blocks on a disk or in a shared store come
nearer meanwhile, if loading them is predicted to be quicker than computing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from dynamo.core.errors import TransferFailed
from dynamo.inference.requests.engine_core import EngineCore
from dynamo.inference.sequence import EngineSequence
from dynamo.inference.tiers.memory_tier import MemoryTier
from dynamo.inference.tiers.tier_source import LoadRun, load_within_deadline

log = logging.getLogger(__name__)

MAX_PROMPTS: Final = 32
"""The first so many waiting prompts are looked at."""
HOST_SHARE: Final = 2
"""The inverse of the share of host memory that the blocks of waiting prompts may take."""

FindRuns = Callable[[EngineSequence], Sequence[LoadRun]]
"""Returns the blocks of a waiting sequence that are worth loading."""


class Prefetcher:
    """Serves the waiting sequences of one engine in order, one at a time."""

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
