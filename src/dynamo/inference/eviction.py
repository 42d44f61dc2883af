"""Eviction: which unreferenced block of the prefix cache is dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice
from math import inf
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.inference.block import Block

EVICTION_POLICIES = ("lru", "reuse")
LIFETIME_VICTIMS = 4096
"""The number of victims over which the lifetime is averaged."""


class ReleasedRun:
    """Blocks that were released together, the next victim first, and the numbers of their last
    uses. `live` of those from `at` on are held; `Block.run` of the others is another one."""

    __slots__ = ("at", "blocks", "live", "queue", "uses")

    def __init__(
        self, blocks: list[Block], uses: Sequence[int], queue: OrderedDict[ReleasedRun, None]
    ) -> None:
        self.blocks, self.uses, self.queue = blocks, uses, queue
        self.at, self.live = 0, len(blocks)
        for block in blocks:
            block.run = self
        queue[self] = None

    def live_blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the blocks that are held, with the numbers of their last uses."""
        pairs = islice(zip(self.uses, self.blocks, strict=True), self.at, None)
        return (pair for pair in pairs if pair[1].run is self)

    def drop(self, count: int) -> None:
        """Note that `count` blocks are not held any more."""
        self.live -= count
        if not self.live:
            del self.queue[self]
        elif self.live < (len(self.blocks) - self.at) // 2:
            self.forget_others()

    def forget_others(self) -> None:
        """Forget the blocks that are not held."""
        self.uses, blocks = zip(*self.live_blocks(), strict=True)
        self.blocks, self.at = list(blocks), 0


class EvictionPolicy:
    """Holds the cached blocks that no sequence references. The pool adds the blocks of a sequence
    tail first, and gets a block before the parent of that block.

    The victim is the block whose last use is longest ago. A `reuse_aware` policy gives a longer
    life to blocks that several requests have used. Such a block may stay unused for one more
    `_lifetime`, the mean age of the blocks that are evicted. Age is counted in released blocks, so
    that an idle engine does not age its cache."""

    def __init__(self, *, reuse_aware: bool = False) -> None:
        self._reuse_aware = reuse_aware
        self._unshared: OrderedDict[ReleasedRun, None] = OrderedDict()
        self._shared: OrderedDict[ReleasedRun, None] = OrderedDict()
        self._count = self._uses = self._victims = 0
        self._lifetime = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, blocks: list[Block]) -> None:
        """Add blocks whose last references were released, in this order."""
        use = self._uses + 1
        self._uses += len(blocks)
        self._count += len(blocks)
        if not (self._reuse_aware and blocks and blocks[-1].hits):  # no hits below the last
            groups: Iterable[tuple[bool, list[Block]]] = [(False, blocks)] if blocks else []
        else:
            groups = ((shared, list(run)) for shared, run in groupby(blocks, _is_shared))
        for shared, run in groups:
            queue = self._shared if shared else self._unshared
            ReleasedRun(run, range(use, use + len(run)), queue)
            use += len(run)

    def remove(self, block: Block) -> None:
        """Remove a block that is referenced again."""
        run: ReleasedRun = block.run
        block.run = None
        self._count -= 1
        run.drop(1)

    def pop(self, count: int) -> list[Block]:
        """Remove the next `count` victims and return them. Raises IndexError if there are fewer."""
        if count > self._count:
            raise IndexError(f"{count} of {self._count} evictable blocks")
        self._count -= count
        victims: list[Block] = []
        while len(victims) < count:
            unshared, shared = _first(self._unshared), _first(self._shared)
            spared_use = shared.uses[shared.at] if shared else inf
            if unshared and spared_use + self._lifetime >= unshared.uses[unshared.at]:
                self._pop_from(unshared, victims, count - len(victims), spared_use)
            elif shared:
                self._pop_from(shared, victims, 1, inf)
        return victims

    def _pop_from(
        self, run: ReleasedRun, victims: list[Block], count: int, spared_use: float
    ) -> None:
        """Move up to `count` blocks of `run` to `victims`, until it is the turn of a shared block
        whose last use was `spared_use`."""
        first, end = run.at, min(run.at + count, len(run.blocks))
        if self._reuse_aware:
            lifetime, number, last_use = self._lifetime, self._victims, self._uses
            at = first
            for use in run.uses[first:end]:
                if spared_use + lifetime < use:
                    break
                if number < LIFETIME_VICTIMS:
                    number += 1
                lifetime += (last_use - use - lifetime) / number
                at += 1
            self._lifetime, self._victims, end = lifetime, number, at
        victims += run.blocks[first:end]
        run.at = end
        run.drop(end - first)

    def peek(self, count: int) -> Iterator[Block]:
        """Yield up to `count` next victims, as `pop` would return them now."""
        lives = (
            ((use + extra, block) for run in queue for use, block in run.live_blocks())
            for queue, extra in ((self._unshared, 0.0), (self._shared, self._lifetime))
        )
        return (block for _, block in islice(merge(*lives, key=_end_of_life), count))


def _first(queue: OrderedDict[ReleasedRun, None]) -> ReleasedRun | None:
    """Return the first run of `queue`, all of whose blocks from `at` on are held."""
    run = next(iter(queue), None)
    if run is not None and run.live < len(run.blocks) - run.at:
        run.forget_others()
    return run


def _is_shared(block: Block) -> bool:
    return block.hits > 0


def _end_of_life(pair: tuple[float, Block]) -> float:
    return pair[0]


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`. Raises `ConfigError` for an unknown name."""
    if name not in EVICTION_POLICIES:
        raise ConfigError(
            f"unknown eviction policy {name!r}", hint=f"choose from: {', '.join(EVICTION_POLICIES)}"
        )
    return EvictionPolicy(reuse_aware=name == "reuse")
