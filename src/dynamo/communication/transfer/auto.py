"""The transfer plane that carries the bytes of each peer in the quickest way that works."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

import msgspec

from dynamo.communication.addresses import parse_listen_url
from dynamo.communication.backends import load_backend
from dynamo.communication.transfer.backend import TransferBackend
from dynamo.communication.transfer.plane import RegionPeer, TransferPlane, TransferSetup
from dynamo.communication.transfer.region import MemoryRegion, RegionDescriptor
from dynamo.communication.transfer.shm import ShmTransfer
from dynamo.communication.transfer.tcp import TcpTransfer
from dynamo.core.errors import TransferFailed
from dynamo.core.plugins import TRANSFER_BACKENDS

log = logging.getLogger(__name__)


class AutoTransfer(TransferPlane):
    """The backend `auto` or `auto://HOST:PORT`: shared memory on one host, TCP at HOST otherwise;
    before TCP comes NIXL, if RDMA is enabled.

    A region is exposed through all backends. The first one that both ends have and whose
    connection comes up is used; the layout is checked in each case.
    """

    def __init__(self, backends: Sequence[TransferBackend]) -> None:
        self._backends = backends

    @classmethod
    async def open(cls, url: str, setup: TransferSetup) -> Self:
        parse_listen_url(url)
        backends: list[TransferBackend] = [await ShmTransfer.open("shm:", setup)]
        if setup.options.rdma:
            host = url.partition(":")[2].rpartition(":")[0]
            nixl: type[TransferBackend] = load_backend(TRANSFER_BACKENDS, "nixl:")
            backends.append(await nixl.open(f"nixl:{host and f'{host}:0'}", setup))
        backends.append(await TcpTransfer.open(f"tcp:{url.partition(':')[2]}", setup))
        return cls(backends)

    async def expose(self, region: MemoryRegion, layout: str) -> RegionDescriptor:
        descriptors = [await backend.expose(region, layout) for backend in self._backends]
        first = descriptors[0]
        endpoints = tuple(end for descriptor in descriptors for end in descriptor.endpoints)
        return msgspec.structs.replace(first, endpoints=endpoints)

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
                backend.endpoint_of(descriptor)
                return await backend.connect(descriptor), rejected
            except TransferFailed as error:
                rejected[backend.scheme] = error.message
                failure = error
        raise failure

    async def close(self) -> None:
        for backend in self._backends:
            await backend.close()
