"""The transfer plane: pull slots of a peer's `MemoryRegion` into slots of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead


class RegionPeer(ABC):
    """The region of another process, as this process reads it."""

    descriptor: RegionDescriptor
    backend: str
    """Scheme of the backend that carries the bytes, for example "shm"."""

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while the peer is not asked because it failed repeatedly."""

    @abstractmethod
    async def pull(self, reads: Sequence[SlotRead], timeout_s: float | None = None) -> None:
        """Copy slots of the peer into slots of the plane's own region.

        Returns when all bytes are there and verified: each generation was the same before and
        after its copy, and over a network each checksum is right. Raises `TransferFailed`. After
        the return, an error or a cancellation, no target is written any more; until then the
        targets may hold anything. `timeout_s` is by default derived from `predict_s`.
        """

    @abstractmethod
    def predict_s(self, size_bytes: int) -> float:
        """Predict the seconds of a pull that starts now, behind the pulls in front of it."""

    @abstractmethod
    async def close(self) -> None:
        """Abort the pulls in flight and let the peer's memory go."""


class TransferPlane(ABC):
    """Exposes the region of this process and connects to those of others."""

    @abstractmethod
    async def expose(self, region: MemoryRegion, layout: str) -> RegionDescriptor:
        """Let peers read `region`. A plane exposes one region, once."""

    @abstractmethod
    async def connect(self, descriptor: RegionDescriptor) -> RegionPeer:
        """Connect to a peer. Raises `TransferFailed`, with reason "refused" if layouts differ."""

    @abstractmethod
    async def close(self) -> None:
        """Close the peers and let nobody read the region any more."""
