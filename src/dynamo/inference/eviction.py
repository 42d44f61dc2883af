"""Which unreferenced block is given up first: the policy of the block pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.inference.block import Block


class EvictionPolicy(ABC):
    """Holds the blocks that are cached and referenced by no sequence.

    The pool adds the blocks of one sequence tails first. Whatever the policy, a block must leave
    before the block that it hangs under.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many blocks may be evicted."""

    @abstractmethod
    def add(self, block: Block) -> None:
        """The last reference to `block` was given back."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """`block` is referenced again."""

    @abstractmethod
    def pop(self) -> Block:
        """Choose a victim and forget it."""


class LeastRecentlyUsed(EvictionPolicy):
    """The block whose last use is longest ago; of one sequence's blocks the tail first."""

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


class ReuseAware(EvictionPolicy):
    """Least recently used, but a block that more than one request has wanted may stay unused for
    as long again as blocks last now: `lifetime`, the mean age at which they are given up. Time is
    counted in blocks given back, so that an idle engine forgets nothing."""

    def __init__(self, window: int = 4096) -> None:
        """`window`: over about so many victims the lifetime is averaged."""
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


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed, "reuse": ReuseAware}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises `ConfigError`."""
    if name not in EVICTION_POLICIES:
        raise ConfigError(
            f"no eviction is called {name!r}", hint=f"known: {', '.join(EVICTION_POLICIES)}"
        )
    return EVICTION_POLICIES[name]()
