"""Prefix-indexed KV memory: which blocks belong to a prefix, and which of them are available."""

from dynamo.inference.memory.prefix_hash import PrefixHash, chained_hash
from dynamo.inference.memory.radix_tree import KVBlock, MatchingBlocks, RadixNode, RadixTree

__all__ = ["KVBlock", "MatchingBlocks", "PrefixHash", "RadixNode", "RadixTree", "chained_hash"]
