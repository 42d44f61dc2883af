"""Blocks by the name of their prefix: a radix tree over the characters of those names.

Routers and caches find blocks by a flat map of chained hashes, which is faster. The tree is for
programs that manage blocks of their own, and finds by shortened names, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from dynamo.core.values import Tier
from dynamo.inference.memory.prefix_hash import PrefixContent, PrefixHash


class KVBlock(msgspec.Struct, frozen=True):
    """One block of KV memory. `content`: what it was computed from; `tier`: where it is held (None:
    nowhere any more)."""

    id: str | int
    content: PrefixContent
    worker_id: str | int | None = None
    tier: Tier | None = "device"


class MatchingBlocks(msgspec.Struct, frozen=True):
    """What bears a prefix. `match_quality`: 1 where the name means one prefix, 1/n where it is
    short for n of them, 0 where nothing was found."""

    all_blocks: list[KVBlock]
    cached_blocks: list[KVBlock]
    missing_blocks: list[KVBlock]
    match_quality: float


class RadixNode:
    """`children`: by the character that comes next; `prefix`: all characters from the root on;
    `is_terminal`: whether that is the name of a prefix that has `blocks`."""

    __slots__ = ("blocks", "children", "is_terminal", "prefix")

    def __init__(self, prefix: str = "") -> None:
        self.children: dict[str, RadixNode] = {}
        self.blocks: list[KVBlock] = []
        self.prefix = prefix
        self.is_terminal = False


def is_in_any_tier(block: KVBlock) -> bool:
    """Whether any tier has it."""
    return block.tier is not None


class RadixTree:
    """`block_registry`: id of a block -> its node. `prefix_hash` names prefixes; `is_cached` tells
    whether a block is at hand, where blocks themselves do not say. Not thread-safe."""

    def __init__(
        self,
        prefix_hash: Callable[[PrefixContent], str] | None = None,
        is_cached: Callable[[KVBlock], bool] = is_in_any_tier,
    ) -> None:
        self.root = RadixNode()
        self.block_registry: dict[str | int, RadixNode] = {}
        self.prefix_hash = prefix_hash or PrefixHash()
        self._is_cached = is_cached

    async def register_block(self, kv_block: KVBlock) -> None:
        """From now on it is found; one of its id before it is not any more."""
        name = self.prefix_hash(kv_block.content)
        await self.remove_block(kv_block.id)
        node = self._find_or_create_node(name)
        node.blocks.append(kv_block)
        node.is_terminal = True
        self.block_registry[kv_block.id] = node

    async def update_block_location(self, migrated_block: KVBlock) -> None:
        """It is at that worker, in that tier now. Raises KeyError for an id never registered."""
        blocks = self.block_registry[migrated_block.id].blocks
        at = next(at for at, block in enumerate(blocks) if block.id == migrated_block.id)
        blocks[at] = msgspec.structs.replace(
            blocks[at], worker_id=migrated_block.worker_id, tier=migrated_block.tier
        )

    async def remove_block(self, block_id: str | int) -> None:
        """It is not found any more; nothing happens where it never was."""
        node = self.block_registry.pop(block_id, None)
        if node is None:
            return
        node.blocks[:] = [block for block in node.blocks if block.id != block_id]
        node.is_terminal = bool(node.blocks)
        if not node.is_terminal:
            self._prune_path(node.prefix)

    async def find_matching_blocks(
        self, prefix_hash: str, worker_id: str | int | None = None
    ) -> MatchingBlocks:
        """Blocks of the prefix of that name, or of all whose names begin so; of one worker where
        `worker_id` says which."""
        found: list[KVBlock] = []
        prefixes = 0
        for node in self._nodes_with_prefix(prefix_hash):
            own = [block for block in node.blocks if worker_id in (None, block.worker_id)]
            found += own
            prefixes += bool(own)
        cached: list[KVBlock] = []
        missing: list[KVBlock] = []
        for block in found:
            (cached if self._is_cached(block) else missing).append(block)
        return MatchingBlocks(found, cached, missing, 1 / prefixes if prefixes else 0.0)

    def _find_or_create_node(self, name: str) -> RadixNode:
        """The node of that name, found or made."""
        node = self.root
        while node.prefix != name:
            at = len(node.prefix)
            below = node.children.get(name[at])
            if below is None:
                below = node.children[name[at]] = RadixNode(name)
            elif not name.startswith(below.prefix):
                fork = RadixNode(_common_prefix(name, below.prefix))
                fork.children[below.prefix[len(fork.prefix)]] = below
                below = node.children[name[at]] = fork
            node = below
        return node

    def _nodes_with_prefix(self, start: str) -> Iterator[RadixNode]:
        """Nodes of prefixes whose names begin with `start`."""
        node: RadixNode | None = self.root
        while node is not None and len(node.prefix) < len(start):
            node = node.children.get(start[len(node.prefix)])
        if node is None or not node.prefix.startswith(start):
            return
        left = [node]
        while left:
            node = left.pop()
            if node.is_terminal:
                yield node
            left += node.children.values()

    def _prune_path(self, name: str) -> None:
        """Nodes on the way to `name` that name nothing and fork nowhere go."""
        way = [self.root]
        while way[-1].prefix != name:
            way.append(way[-1].children[name[len(way[-1].prefix)]])
        for above, node in zip(way[-2::-1], way[:0:-1], strict=True):
            if node.is_terminal or len(node.children) > 1:
                return
            first = node.prefix[len(above.prefix)]
            if node.children:
                (above.children[first],) = node.children.values()
            else:
                del above.children[first]


def _common_prefix(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
