"""Eviction policies: which unreferenced block of the prefix cache is dropped first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.inference.block import Block


class EvictionPolicy(ABC):
    """Holds the cached blocks that no sequence references. The pool adds the blocks of a sequence
    tail first. Every policy must return a block before the parent of that block."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the evictable blocks."""

    @abstractmethod
    def add(self, block: Block) -> None:
        """Add a block whose last reference was released."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """Remove a block that is referenced again."""

    @abstractmethod
    def pop(self) -> Block:
        """Remove the next victim and return it."""

    @abstractmethod
    def peek(self, count: int) -> Iterator[Block]:
        """Yield up to `count` next victims, as `pop` would return them now."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the block whose last use is longest ago, and the tail of a chain first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        self._blocks[block.id] = block

    def remove(self, block: Block) -> None:
        del self._blocks[block.id]

    def pop(self) -> Block:
        return self._blocks.popitem(last=False)[1]

    def peek(self, count: int) -> Iterator[Block]:
        return islice(self._blocks.values(), count)


class ReuseAware(EvictionPolicy):
    """Least recently used, with a longer life for blocks that several requests have used. Such a
    block may stay unused for one more `_lifetime`, the mean age of the blocks that are evicted. Age
    is counted in released blocks, so that an idle engine does not age its cache."""

    def __init__(self, window: int = 4096) -> None:
        """`window`: the number of victims over which the lifetime is averaged."""
        self._unshared: OrderedDict[Block, None] = OrderedDict()
        self._shared: OrderedDict[Block, None] = OrderedDict()
        self._blocks_released = 0
        self._lifetime = 0.0
        self._victims = 0
        self._window = window

    def __len__(self) -> int:
        return len(self._unshared) + len(self._shared)

    def add(self, block: Block) -> None:
        block.last_used = self._blocks_released = self._blocks_released + 1
        if block.hits:
            self._shared[block] = None
        else:
            self._unshared[block] = None

    def remove(self, block: Block) -> None:
        if block in self._unshared:
            del self._unshared[block]
        else:
            del self._shared[block]

    def pop(self) -> Block:
        queue, shared = self._unshared, self._shared
        if shared and (
            not queue or next(iter(shared)).last_used + self._lifetime < next(iter(queue)).last_used
        ):
            queue = shared
        block = queue.popitem(last=False)[0]
        if self._victims < self._window:
            self._victims += 1
        self._lifetime += (self._blocks_released - block.last_used - self._lifetime) / self._victims
        return block

    def peek(self, count: int) -> Iterator[Block]:
        lifetime = self._lifetime

        def end_of_life(block: Block) -> float:
            return block.last_used + lifetime if block.hits else block.last_used

        return islice(merge(self._unshared, self._shared, key=end_of_life), count)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed, "reuse": ReuseAware}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`. Raises `ConfigError` for an unknown name."""
    if name not in EVICTION_POLICIES:
        raise ConfigError(
            f"unknown eviction policy {name!r}", hint=f"choose from: {', '.join(EVICTION_POLICIES)}"
        )
    return EVICTION_POLICIES[name]()
