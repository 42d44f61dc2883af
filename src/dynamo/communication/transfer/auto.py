"""The transfer plane that carries the bytes of each peer in the quickest way that works."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

from dynamo.communication.addresses import new_incarnation, parse_listen_url
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.transfer.backend import TransferBackend
from dynamo.communication.transfer.metrics import TransferMetrics
from dynamo.communication.transfer.plane import RegionPeer, TransferPlane
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor
from dynamo.communication.transfer.shm import ShmTransfer
from dynamo.communication.transfer.tcp import TcpTransfer
from dynamo.core.clock import Clock
from dynamo.core.errors import TransferFailed

log = logging.getLogger(__name__)


class AutoTransfer(TransferPlane):
    """The backend `auto` or `auto://HOST:PORT`: shared memory on one host, TCP at HOST otherwise.

    A region is exposed through all backends. The first one that both ends have and whose
    connection comes up is used; the layout is checked in each case.
    """

    def __init__(self, backends: Sequence[TransferBackend]) -> None:
        self._backends = backends

    @classmethod
    async def open(
        cls,
        url: str,
        options: PlaneOptions = DEFAULT_OPTIONS,
        clock: Clock | None = None,
        metrics: TransferMetrics | None = None,
    ) -> Self:
        """Create a plane that does not listen yet. Raises `ConfigError` as `tcp:`."""
        parse_listen_url(url)
        incarnation = new_incarnation()
        tcp_url = f"tcp:{url.partition(':')[2]}"
        metrics = metrics or TransferMetrics()
        tcp = await TcpTransfer.open(tcp_url, options, clock, metrics, incarnation)
        shm = await ShmTransfer.open("shm:", options, clock, metrics, incarnation)
        return cls((shm, tcp))

    async def expose(self, region: MemoryRegion, layout: str) -> RegionDescriptor:
        descriptors = [await backend.expose(region, layout) for backend in self._backends]
        first = descriptors[0]
        endpoints = tuple(end for descriptor in descriptors for end in descriptor.endpoints)
        return RegionDescriptor(
            first.slots, first.slot_bytes, first.layout, endpoints, first.incarnation
        )

    async def connect(self, descriptor: RegionDescriptor) -> RegionPeer:
        peer, rejected = await self.choose(descriptor)
        fields = {"peer": descriptor.incarnation, "backend": peer.backend, **rejected}
        log.info("connected to a peer's KV blocks", extra={"fields": fields})
        return peer

    async def choose(self, descriptor: RegionDescriptor) -> tuple[RegionPeer, dict[str, str]]:
        """Return the peer, and for each backend that was tried before why it does not work."""
        rejected: dict[str, str] = {}
        for backend in self._backends:
            try:
                return await backend.connect(descriptor), rejected
            except TransferFailed as error:
                rejected[backend.scheme] = error.message
                failure = error
        raise failure

    async def close(self) -> None:
        for backend in self._backends:
            await backend.close()
