"""KV memory: the endpoint that controls a worker's tiers, and the names of `dynamo.library` for
programs that keep KV blocks without an engine."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.library.block_manager import CacheHitInfo as CacheHitInfo
    from dynamo.library.block_manager import KVCacheBlockManager as KVCacheBlockManager
    from dynamo.library.block_manager import MigrationResult as MigrationResult
    from dynamo.library.cache_policy import AccessPatternAnalyzer as AccessPatternAnalyzer
    from dynamo.library.cache_policy import LRUCachePolicy as LRUCachePolicy
    from dynamo.library.memory_tiers import CPUMemoryTier as CPUMemoryTier
    from dynamo.library.memory_tiers import GPUMemoryTier as GPUMemoryTier
    from dynamo.library.memory_tiers import RemoteMemoryTier as RemoteMemoryTier
    from dynamo.library.memory_tiers import SSDMemoryTier as SSDMemoryTier
    from dynamo.library.prefix_hash import PrefixHash as PrefixHash
    from dynamo.library.prefix_hash import chained_hash as chained_hash
    from dynamo.library.radix_tree import KVBlock as KVBlock
    from dynamo.library.radix_tree import MatchingBlocks as MatchingBlocks
    from dynamo.library.radix_tree import RadixNode as RadixNode
    from dynamo.library.radix_tree import RadixTree as RadixTree

_NAMES = {
    "block_manager": ("CacheHitInfo", "KVCacheBlockManager", "MigrationResult"),
    "cache_policy": ("AccessPatternAnalyzer", "LRUCachePolicy"),
    "memory_tiers": ("CPUMemoryTier", "GPUMemoryTier", "RemoteMemoryTier", "SSDMemoryTier"),
    "prefix_hash": ("PrefixHash", "chained_hash"),
    "radix_tree": ("KVBlock", "MatchingBlocks", "RadixNode", "RadixTree"),
}
__all__ = [name for names in _NAMES.values() for name in names]

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = {name: f"dynamo.library.{module}" for module in _NAMES for name in _NAMES[module]}
    __getattr__ = load_on_use(__name__, homes)
