"""Engines, their KV memory, and the workers that serve them."""

from dynamo.inference.disaggregation.library import (
    DecodeEngine,
    DecodeResult,
    KVCacheTransfer,
    KvMetadata,
    PrefillEngine,
    PrefillResult,
    TransferResult,
)
from dynamo.inference.kv_publisher import KVPublisher

__all__ = [
    "DecodeEngine",
    "DecodeResult",
    "KVCacheTransfer",
    "KVPublisher",
    "KvMetadata",
    "PrefillEngine",
    "PrefillResult",
    "TransferResult",
]
