"""Engines, their KV memory, and the workers that serve them."""

from typing import TYPE_CHECKING

from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.inference.kv_publisher import KVPublisher
    from dynamo.library.batch_optimizer import BatchOptimizer, OptimizedBatches
    from dynamo.library.engines import (
        DecodeEngine,
        DecodeResult,
        KVCacheTransfer,
        KvMetadata,
        PrefillEngine,
        PrefillResult,
        TransferResult,
    )
    from dynamo.library.gpu_memory_optimizer import GPUMemoryOptimizer, OptimizedLayout

__all__ = [
    "BatchOptimizer",
    "DecodeEngine",
    "DecodeResult",
    "GPUMemoryOptimizer",
    "KVCacheTransfer",
    "KVPublisher",
    "KvMetadata",
    "OptimizedBatches",
    "OptimizedLayout",
    "PrefillEngine",
    "PrefillResult",
    "TransferResult",
]

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = dict.fromkeys(__all__, "dynamo.library.engines")
    homes["KVPublisher"] = "dynamo.inference.kv_publisher"
    for name in ("BatchOptimizer", "OptimizedBatches"):
        homes[name] = "dynamo.library.batch_optimizer"
    for name in ("GPUMemoryOptimizer", "OptimizedLayout"):
        homes[name] = "dynamo.library.gpu_memory_optimizer"
    __getattr__ = load_on_use(__name__, homes)
