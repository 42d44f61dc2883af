"""The transfer plane: pull slots of a peer's `MemoryRegion` into slots of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynamo.communication.backends import load_backend
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.clock import Clock
from dynamo.core.plugins import TRANSFER_BACKENDS


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
        """Let peers read `region`. A plane exposes one region, once.

        The region belongs to the caller, who closes it. Its memory stays until the plane is closed.
        """

    @abstractmethod
    async def connect(self, descriptor: RegionDescriptor) -> RegionPeer:
        """Connect to a peer, after `expose`. Raises `TransferFailed`, with reason "refused" if the
        layouts differ."""

    @abstractmethod
    async def close(self) -> None:
        """Close the peers, and let nobody read the region any more."""


async def open_transfer(
    url: str,
    options: PlaneOptions = DEFAULT_OPTIONS,
    clock: Clock | None = None,
    metrics: TransferMetrics | None = None,
) -> TransferPlane:
    """Open a backend by URL. Raises `ConfigError`."""
    backend = load_backend(TRANSFER_BACKENDS, url)
    plane: TransferPlane = await backend.open(url, options, clock, metrics)
    return plane
