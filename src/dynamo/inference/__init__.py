"""Engines, their KV memory, and the workers that serve them."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.inference.kv_publisher import KVPublisher
    from dynamo.library.engines import (
        DecodeEngine,
        DecodeResult,
        KVCacheTransfer,
        KvMetadata,
        PrefillEngine,
        PrefillResult,
        TransferResult,
    )

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

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = dict.fromkeys(__all__, "dynamo.library.engines")
    homes["KVPublisher"] = "dynamo.inference.kv_publisher"
    __getattr__ = load_on_use(__name__, homes)
