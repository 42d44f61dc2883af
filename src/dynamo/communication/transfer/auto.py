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
    if RDMA is enabled, the quicker of NIXL and TCP.

    A region is exposed through all backends. Shared memory is used wherever it can be: it is a
    single copy, and no network is quicker. A probe compares the others that both ends have. The
    layout is checked in each case.
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
        """Return the peer, and why each of the other backends that were considered is not used."""
        rejected: dict[str, TransferFailed] = {}
        for backends in (self._backends[:1], self._backends[1:]):
            for backend in await _by_speed(backends, descriptor, rejected):
                try:
                    peer = await backend.connect(descriptor)
                except TransferFailed as error:
                    rejected[backend.scheme] = error
                    continue
                rejected.pop(backend.scheme, None)
                return peer, {name: error.message for name, error in rejected.items()}
        raise list(rejected.values())[-1]

    async def close(self) -> None:
        for backend in self._backends:
            await backend.close()


async def _by_speed(
    backends: Sequence[TransferBackend],
    descriptor: RegionDescriptor,
    rejected: dict[str, TransferFailed],
) -> list[TransferBackend]:
    """Return the backends that both ends have, the quickest first. A probe orders several.

    `rejected` gets why the others do not work or are slower.
    """
    possible: list[TransferBackend] = []
    for backend in backends:
        try:
            backend.endpoint_of(descriptor)
            possible.append(backend)
        except TransferFailed as error:
            rejected[backend.scheme] = error
    if len(possible) < 2:
        return possible
    seconds: dict[TransferBackend, float] = {}
    for backend in possible:
        try:
            seconds[backend] = await backend.probe(descriptor)
        except TransferFailed as error:
            rejected[backend.scheme] = error
    ordered = sorted(seconds, key=seconds.__getitem__)
    for slower in ordered[1:]:
        first, other = ordered[0], 1e3 * seconds[slower]
        text = f"slower: a read took {other:.2f} ms, by {first.scheme} {1e3 * seconds[first]:.2f}"
        rejected[slower.scheme] = TransferFailed.of("refused", text)
    return ordered
