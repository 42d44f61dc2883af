"""Eviction policies: which unreferenced block of the prefix cache is dropped first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from math import inf
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
    def add(self, blocks: Iterable[Block]) -> None:
        """Add blocks whose last references were released, in this order."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """Remove a block that is referenced again."""

    @abstractmethod
    def pop(self, count: int) -> list[Block]:
        """Remove the next `count` victims and return them. Raises KeyError if there are fewer."""

    @abstractmethod
    def peek(self, count: int) -> Iterator[Block]:
        """Yield up to `count` next victims, as `pop` would return them now."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the block whose last use is longest ago, and the tail of a chain first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Iterable[Block]) -> None:
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, block: Block) -> None:
        del self._blocks[block]

    def pop(self, count: int) -> list[Block]:
        pop = self._blocks.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def peek(self, count: int) -> Iterator[Block]:
        return islice(self._blocks, count)


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

    def add(self, blocks: Iterable[Block]) -> None:
        released, unshared, shared = self._blocks_released, self._unshared, self._shared
        for block in blocks:
            block.last_used = released = released + 1
            if block.hits:
                shared[block] = None
            else:
                unshared[block] = None
        self._blocks_released = released

    def remove(self, block: Block) -> None:
        if block in self._unshared:
            del self._unshared[block]
        else:
            del self._shared[block]

    def pop(self, count: int) -> list[Block]:
        unshared, shared = self._unshared, self._shared
        released, lifetime, victims = self._blocks_released, self._lifetime, self._victims
        oldest_shared = next(iter(shared)).last_used if shared else inf
        popped: list[Block] = []
        for _ in range(count):
            block = unshared.popitem(last=False)[0] if unshared else None
            if block is None or oldest_shared + lifetime < block.last_used:
                if block is not None:
                    unshared[block] = None
                    unshared.move_to_end(block, last=False)
                block = shared.popitem(last=False)[0]
                oldest_shared = next(iter(shared)).last_used if shared else inf
            popped.append(block)
            if victims < self._window:
                victims += 1
            lifetime += (released - block.last_used - lifetime) / victims
        self._lifetime, self._victims = lifetime, victims
        return popped

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
