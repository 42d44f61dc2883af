"""Which unreferenced block is given up first: the policy of the block pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo.inference.block import Block


class Eviction(ABC):
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


class LeastRecentlyUsed(Eviction):
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
