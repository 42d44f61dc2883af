"""The transfer plane: KV blocks between processes. Backends are in `core/plugins.py`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from dynamo.communication.transfer.layout import KvLayout
from dynamo.communication.transfer.plane import (
    RegionPeer,
    TransferMetrics,
    TransferPlane,
    open_transfer,
)
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead

if TYPE_CHECKING:
    from dynamo.communication.transfer.converted import MemoryPool
    from dynamo.communication.transfer.nixl_client import NIXLClient
    from dynamo.communication.transfer.optimizer import (
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

_HOMES: Final = {"MemoryPool": "converted", "NIXLClient": "nixl_client"}
"""Modules of names that workers do not need; `optimizer` has the others."""


if not TYPE_CHECKING:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'optimizer')}"), name)
