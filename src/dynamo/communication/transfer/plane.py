"""The transfer plane: pull slots of a peer's `MemoryRegion` into slots of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Self, get_args

import msgspec

from dynamo.communication.addresses import new_incarnation
from dynamo.communication.backends import load_backend
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor, SlotRead
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import TransferFailure
from dynamo.core.plugins import TRANSFER_BACKENDS
from dynamo.telemetry import Registry

_SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class TransferMetrics:
    """Counts bytes, seconds and failures of the pulls of a process."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry()
        self.bytes = registry.counter(
            "dynamo_transfer_bytes_total",
            "Bytes of KV blocks and weights pulled from peers",
            ("backend",),
        )
        self.seconds = registry.histogram(
            "dynamo_transfer_seconds",
            "Time of a pull from a peer, without failed ones",
            _SECONDS_BOUNDS,
            ("backend",),
        )
        self.failures = registry.counter(
            "dynamo_transfer_failures_total",
            "Failed pulls and connections: stale, checksum, gone, timeout, refused",
            ("backend", "reason"),
        )

    def begin(self, backend: str) -> None:
        """Begin the series of a backend at 0."""
        self.bytes.labels(backend)
        self.seconds.labels(backend)
        for reason in get_args(TransferFailure):
            self.failures.labels(backend, reason)


class TransferSetup(msgspec.Struct, frozen=True):
    """The inputs of a transfer plane beside its URL. `incarnation` identifies the plane to peers:
    the backends of one `auto` plane share it."""

    options: PlaneOptions = DEFAULT_OPTIONS
    clock: Clock = msgspec.field(default_factory=SystemClock)
    metrics: TransferMetrics = msgspec.field(default_factory=TransferMetrics)
    incarnation: str = msgspec.field(default_factory=new_incarnation)

    @property
    def secret(self) -> str:
        """The secret that both ends of a connection prove to know; "" if there is none."""
        return self.options.secret or self.options.folder_secret


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

    @classmethod
    @abstractmethod
    async def open(cls, url: str, setup: TransferSetup) -> Self:
        """Create a plane that does not listen yet. Raises `ConfigError`."""

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
    setup = TransferSetup(options, clock or SystemClock(), metrics or TransferMetrics())
    plane: TransferPlane = await backend.open(url, setup)
    return plane
