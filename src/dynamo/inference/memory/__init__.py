"""Prefix-indexed KV memory: the blocks of a prefix, the tier that holds each, and their moves."""

from dynamo.inference.memory.block_manager import (
    CacheHitInfo,
    KVCacheBlockManager,
    MigrationResult,
)
from dynamo.inference.memory.cache_policy import AccessPatternAnalyzer, LRUCachePolicy
from dynamo.inference.memory.library_tiers import (
    CPUMemoryTier,
    GPUMemoryTier,
    RemoteMemoryTier,
    SSDMemoryTier,
)
from dynamo.inference.memory.prefix_hash import PrefixHash, chained_hash
from dynamo.inference.memory.radix_tree import KVBlock, MatchingBlocks, RadixNode, RadixTree

__all__ = [
    "AccessPatternAnalyzer",
    "CPUMemoryTier",
    "CacheHitInfo",
    "GPUMemoryTier",
    "KVBlock",
    "KVCacheBlockManager",
    "LRUCachePolicy",
    "MatchingBlocks",
    "MigrationResult",
    "PrefixHash",
    "RadixNode",
    "RadixTree",
    "RemoteMemoryTier",
    "SSDMemoryTier",
    "chained_hash",
]
