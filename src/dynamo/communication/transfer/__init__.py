"""The transfer plane: KV blocks between processes. Backends: `memory:`, `shm:`, `tcp:`, `auto`."""

from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.plane import RegionPeer, TransferPlane, open_transfer
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead

__all__ = [
    "MemoryRegion",
    "RegionDescriptor",
    "RegionPeer",
    "SlotRead",
    "TransferMetrics",
    "TransferPlane",
    "open_transfer",
]
