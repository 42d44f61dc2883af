"""KV memory seen by prefix: which blocks belong to a prefix, and which of them are at hand."""

from dynamo.inference.memory.prefix_hash import PrefixHash, chained_hash
from dynamo.inference.memory.radix_tree import KVBlock, MatchingBlocks, RadixNode, RadixTree

__all__ = [
    "KVBlock",
    "MatchingBlocks",
    "PrefixHash",
    "RadixNode",
    "RadixTree",
    "chained_hash",
]
