"""The prefix cache of a simulated worker that has memory tiers below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

from dynamo.operations.replay.fast.run_cache import CachedRun, Held, RunCache
from dynamo.operations.replay.fast.tier_units import Unit

NO_KEY = -1
"""Stands for the blocks of a run that nobody finds."""


class TieredRunCache(RunCache):
    """The blocks of a worker with tiers. `on_evicted` gets the keys of evicted units.
    `registrations` counts the blocks that became cached. `released` is set when a request gives
    blocks back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.registrations = 0
        self.released = False
        self.on_evicted: Callable[[Sequence[int]], None] = lambda _: None

    def next_victims(self, blocks: int) -> Iterator[tuple[CachedRun, Unit]]:
        """Yield the units of up to `blocks`, each with its run, in the order of eviction."""
        lives = (
            ((run.last_used - run.blocks + extra, run) for run in queue)
            for queue, extra in ((self._unshared, 0.0), (self._shared, self._lifetime))
        )
        for _, run in merge(*lives, key=itemgetter(0)):
            left, keys = run.blocks, run.keys
            if not keys:
                size = min(left, blocks)
                yield run, (NO_KEY, size)
                blocks -= size
            for index in range(len(keys) - 1, -1, -1):
                if blocks <= 0:
                    break
                size = left - index * self.unit
                yield run, (keys[index], size)
                left -= size
                blocks -= size
            if blocks <= 0:
                return

    def register(
        self, held: list[Held], keys: Sequence[int], at: int, end: int, blocks: int
    ) -> None:
        free = self.free
        super().register(held, keys, at, end, blocks)
        self.registrations += blocks - (self.free - free)

    def release(self, held: Sequence[Held], answer: int, unused: int) -> None:
        self.released = True
        super().release(held, answer, unused)

    def _queue_answer(self, blocks: int) -> None:
        self.registrations += blocks
        last = self._last_answer
        super()._queue_answer(blocks)
        if last is not None and last is self._last_answer:
            last.whole += blocks

    def _drop(self, keys: Sequence[int]) -> None:
        super()._drop(keys)
        self.on_evicted(keys)
