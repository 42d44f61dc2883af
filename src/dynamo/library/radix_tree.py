"""A radix tree that finds KV blocks by the name of their prefix, or by the start of a name.

Routers and caches use a flat map of chained hashes instead, which is faster. The tree is for
programs that manage their own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from dynamo.core.values import Tier
from dynamo.library.prefix_hash import PrefixContent, PrefixHash


class KVBlock(msgspec.Struct, frozen=True):
    """A block of KV memory, computed from `content`. `tier` None: no tier holds it any more."""

    id: str | int
    content: PrefixContent
    worker_id: str | int | None = None
    tier: Tier | None = "device"


class MatchingBlocks(msgspec.Struct, frozen=True):
    """The blocks found under a prefix name. `match_quality` is 1 if the name means one prefix, 1/n
    if it is the start of n names, and 0 if nothing was found."""

    all_blocks: list[KVBlock]
    cached_blocks: list[KVBlock]
    missing_blocks: list[KVBlock]
    match_quality: float


class RadixNode:
    """A node of the tree. `prefix` holds all characters from the root to this node. `children` maps
    the next character to a node. `is_terminal` is True if `prefix` is the name of a prefix that has
    `blocks`."""

    def __init__(self, prefix: str = "") -> None:
        self.children: dict[str, RadixNode] = {}
        self.blocks: list[KVBlock] = []
        self.prefix = prefix
        self.is_terminal = False


class RadixTree:
    """Blocks by prefix name. Not thread-safe. `block_registry` maps a block's id to its node.
    `prefix_hash` computes names. `is_cached` decides whether a block is available."""

    def __init__(
        self,
        prefix_hash: Callable[[PrefixContent], str] | None = None,
        is_cached: Callable[[KVBlock], bool] = lambda block: block.tier is not None,
    ) -> None:
        self.root = RadixNode()
        self.block_registry: dict[str | int, RadixNode] = {}
        self.prefix_hash = prefix_hash or PrefixHash()
        self._is_cached = is_cached

    async def register_block(self, kv_block: KVBlock) -> None:
        """Add a block. A block with the same id is replaced."""
        name = self.prefix_hash(kv_block.content)
        await self.remove_block(kv_block.id)
        node = self._find_or_create_node(name)
        node.blocks.append(kv_block)
        node.is_terminal = True
        self.block_registry[kv_block.id] = node

    async def update_block_location(self, migrated_block: KVBlock) -> None:
        """Set the worker and the tier of a block. Raises KeyError for an unknown id."""
        blocks = self.block_registry[migrated_block.id].blocks
        index = next(index for index, block in enumerate(blocks) if block.id == migrated_block.id)
        blocks[index] = msgspec.structs.replace(
            blocks[index], worker_id=migrated_block.worker_id, tier=migrated_block.tier
        )

    async def remove_block(self, block_id: str | int) -> None:
        """Remove a block. An unknown id changes nothing."""
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
        """Find the blocks under `prefix_hash`, which may be the start of several names. `worker_id`
        limits the result to one worker."""
        blocks: list[KVBlock] = []
        prefixes = 0
        for node in self._nodes_with_prefix(prefix_hash):
            node_blocks = [block for block in node.blocks if worker_id in (None, block.worker_id)]
            blocks += node_blocks
            prefixes += bool(node_blocks)
        cached: list[KVBlock] = []
        missing: list[KVBlock] = []
        for block in blocks:
            (cached if self._is_cached(block) else missing).append(block)
        return MatchingBlocks(blocks, cached, missing, 1 / prefixes if prefixes else 0.0)

    def _find_or_create_node(self, name: str) -> RadixNode:
        node = self.root
        while node.prefix != name:
            depth = len(node.prefix)
            child = node.children.get(name[depth])
            if child is None:
                child = node.children[name[depth]] = RadixNode(name)
            elif not name.startswith(child.prefix):
                fork = RadixNode(_common_prefix(name, child.prefix))
                fork.children[child.prefix[len(fork.prefix)]] = child
                child = node.children[name[depth]] = fork
            node = child
        return node

    def _nodes_with_prefix(self, start: str) -> Iterator[RadixNode]:
        """Yield the terminal nodes whose names begin with `start`."""
        node: RadixNode | None = self.root
        while node is not None and len(node.prefix) < len(start):
            node = node.children.get(start[len(node.prefix)])
        if node is None or not node.prefix.startswith(start):
            return
        pending = [node]
        while pending:
            node = pending.pop()
            if node.is_terminal:
                yield node
            pending += node.children.values()

    def _prune_path(self, name: str) -> None:
        """Remove the nodes on the path to `name` that neither name a prefix nor fork."""
        path = [self.root]
        while path[-1].prefix != name:
            path.append(path[-1].children[name[len(path[-1].prefix)]])
        for parent, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.is_terminal or len(node.children) > 1:
                return
            first = node.prefix[len(parent.prefix)]
            if node.children:
                (parent.children[first],) = node.children.values()
            else:
                del parent.children[first]


def _common_prefix(first: str, second: str) -> str:
    """Return the common start of two names."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))]
