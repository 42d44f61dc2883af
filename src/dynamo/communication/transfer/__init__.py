"""The transfer plane: KV blocks between processes. Backends are in `core/plugins.py`."""

from typing import TYPE_CHECKING

from dynamo.communication.transfer.layout import KvLayout
from dynamo.communication.transfer.plane import (
    RegionPeer,
    TransferMetrics,
    TransferPlane,
    open_transfer,
)
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.public_names import load_on_use

if TYPE_CHECKING:
    from dynamo.communication.transfer.converted import MemoryPool
    from dynamo.library.nixl_client import NIXLClient
    from dynamo.library.transfer_optimizers import (
        ContinuousBlockMerger,
        MemoryDescriptorOptimizer,
        NetworkOptimizer,
        OptimizedDescriptors,
        OptimizedTransfer,
    )

__all__ = [
    "ContinuousBlockMerger",
    "KvLayout",
    "MemoryDescriptorOptimizer",
    "MemoryPool",
    "MemoryRegion",
    "NIXLClient",
    "NetworkOptimizer",
    "OptimizedDescriptors",
    "OptimizedTransfer",
    "RegionDescriptor",
    "RegionPeer",
    "SlotRead",
    "TransferMetrics",
    "TransferPlane",
    "open_transfer",
]

if not TYPE_CHECKING:  # unknown names stay errors to the type checker
    homes = dict.fromkeys(__all__, "dynamo.library.transfer_optimizers")
    homes["MemoryPool"] = "dynamo.communication.transfer.converted"
    homes["NIXLClient"] = "dynamo.library.nixl_client"
    __getattr__ = load_on_use(__name__, homes)
