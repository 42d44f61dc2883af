"""The transfer plane: pull slots of a peer's `MemoryRegion` into slots of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from dynamo.communication.backends import load_backend
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer.estimate import PeerBreaker
from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.clock import Clock
from dynamo.core.errors import InternalError, TransferFailed
from dynamo.core.plugins import TRANSFER_BACKENDS

MAX_BREAKERS: Final = 256


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

    def __init__(
        self, clock: Clock, incarnation: str, metrics: TransferMetrics | None = None
    ) -> None:
        self.clock = clock
        self.incarnation = incarnation
        self.metrics = metrics or TransferMetrics()
        self.region: MemoryRegion | None = None
        self.layout = ""
        self._breakers: dict[str, PeerBreaker] = {}

    async def expose(self, region: MemoryRegion, layout: str) -> RegionDescriptor:
        """Let peers read `region`. A plane exposes one region, once.

        The region belongs to the caller, who closes it after the plane.
        """
        if self.region is not None:
            raise InternalError("a transfer plane exposes one region, and does so already")
        self.region, self.layout = region, layout
        endpoints = await self._listen()
        return RegionDescriptor(
            region.slots, region.slot_bytes, layout, endpoints, self.incarnation
        )

    async def connect(self, descriptor: RegionDescriptor) -> RegionPeer:
        """Connect to a peer. Raises `TransferFailed`, with reason "refused" if layouts differ."""
        region = self.region
        if region is None:
            raise InternalError("a transfer plane connects after its own region is exposed")
        if (descriptor.layout, descriptor.slot_bytes) != (self.layout, region.slot_bytes):
            raise TransferFailed.of(
                "refused",
                f"the blocks of the peer have layout {descriptor.layout} with "
                f"{descriptor.slot_bytes} bytes, those here {self.layout} with {region.slot_bytes}",
                hint="serve both workers with the same model, weights and --block-size",
            )
        return await self._connect(descriptor, region)

    def breaker(self, incarnation: str) -> PeerBreaker:
        """Return the breaker of a peer, which outlives its `RegionPeer`."""
        breaker = self._breakers.get(incarnation)
        if breaker is None:
            if len(self._breakers) >= MAX_BREAKERS:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers[incarnation] = PeerBreaker()
        return breaker

    @abstractmethod
    async def _listen(self) -> tuple[str, ...]:
        """Serve the region. Returns the endpoints by preference."""

    @abstractmethod
    async def _connect(self, descriptor: RegionDescriptor, region: MemoryRegion) -> RegionPeer:
        """Connect to a peer of the same layout. Raises `TransferFailed`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the peers and let nobody read the region any more."""


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
