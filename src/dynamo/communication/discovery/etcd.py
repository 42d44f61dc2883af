"""Discovery on etcd: a lease per process, records under it, watches that outlive the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from random import Random
from typing import Final, Self

from dynamo.communication.directory import Watch
from dynamo.communication.discovery.etcd_link import EtcdLink, parse_servers
from dynamo.communication.discovery.etcd_server import EtcdServer, LeaseGone
from dynamo.communication.discovery.etcd_watch import KeptWatch
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.tls import client_context
from dynamo.core.errors import PlaneAway, TooLarge
from dynamo.core.tasks import Tasks

log = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = 1 << 20
"""etcd takes 1.5 MiB a request."""
REFRESHES: Final = 3
"""In one time-to-live."""

ATTEMPTS: Final = 3
"""To revoke somebody else's lease, of a server that answers."""


class EtcdDiscovery(Discovery):
    """`etcd://HOST:PORT[,HOST:PORT][/ROOT]`.

    While no server answers, watches stand still, `get` raises `PlaneAway`, and what is put or
    deleted is written when one is back. The lease is taken with the first `put`.
    """

    def __init__(self, link: EtcdLink, root: str, ttl_s: float) -> None:
        self._link = link
        self._root = root
        self._ttl_s = ttl_s
        self._tasks = Tasks()
        self._lease = 0
        self._writing = asyncio.Lock()
        self._unwritten: dict[str, bytes | None] = {}
        self._lost: list[Callable[[], None]] = []
        self._arrived = asyncio.Event()
        self._closed = False
        link.start(self._arrived.set)
        self._tasks.start(self._keep_lease(), "etcd lease")

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """Dialling goes on in the background. Raises `ConfigError`."""
        servers, root = parse_servers(url)
        if any(one.tls for one in servers):
            await asyncio.to_thread(client_context, options.server_tls)
        return cls(EtcdLink(servers, options, Random()), root, options.lease_ttl_s)

    @property
    def trouble(self) -> str:
        return self._link.trouble

    async def put(self, key: str, value: bytes) -> None:
        if len(key) + len(value) > MAX_RECORD_BYTES:
            raise TooLarge(f"record {key[:100]!r} of {len(value)} bytes")
        self._unwritten.pop(key, None)
        self._unwritten[key] = value
        await self._write_through()

    async def delete(self, key: str) -> None:
        self._unwritten.pop(key, None)
        self._unwritten[key] = None
        await self._write_through()

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        await self._link.tried.wait()
        server = self._link.now
        if server is None:
            raise PlaneAway(self._link.trouble)
        try:
            _, state = await server.read(self._root + prefix)
        except PlaneAway as error:
            self._link.failed(server, error)
            raise
        return {key[len(self._root) :]: value for key, value in state.items()}

    async def bury(self, key: str) -> None:
        for left in reversed(range(ATTEMPTS)):
            server = await self._link.server()
            try:
                await server.revoke(await server.lease_of(self._root + key))
            except LeaseGone:
                return
            except PlaneAway as error:
                self._link.failed(server, error)
                if not left:
                    raise
            else:
                return

    def watch(self, prefix: str) -> AbstractAsyncContextManager[Watch]:
        return self._watch(prefix)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._lost.append(callback)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        server = self._link.now
        if server is not None and self._lease:
            with suppress(PlaneAway, LeaseGone):
                await server.revoke(self._lease)
        await self._link.close()

    @asynccontextmanager
    async def _watch(self, prefix: str) -> AsyncIterator[Watch]:
        kept = KeptWatch(self._link, self._root, prefix)
        running = self._tasks.start(kept.run(), f"etcd watch {prefix}")
        try:
            yield kept.feed
        finally:
            running.cancel()

    async def _write_through(self) -> None:
        """Write what waits, if a server answers; returns at once while none does."""
        await self._link.tried.wait()
        server = self._link.now
        if server is not None:
            await self._write(server)

    async def _write(self, server: EtcdServer) -> None:
        async with self._writing:
            while self._unwritten:
                key, value = next(iter(self._unwritten.items()))
                try:
                    await self._write_one(server, self._root + key, value)
                except LeaseGone:
                    self._lose()
                    continue
                except PlaneAway as error:
                    self._link.failed(server, error)
                    return
                if self._unwritten.get(key, b"") is value:
                    del self._unwritten[key]

    async def _write_one(self, server: EtcdServer, key: str, value: bytes | None) -> None:
        if value is not None:
            self._lease = self._lease or await server.grant(self._ttl_s)
            await server.put(key, value, self._lease)
        elif self._lease:
            await server.delete(key, self._lease)

    async def _keep_lease(self) -> None:
        """Refresh it in time, and first of all whenever a server answers anew."""
        while True:
            server = await self._link.server()
            self._arrived.clear()
            try:
                if self._lease:
                    await server.refresh(self._lease)
                await self._write(server)
            except LeaseGone:
                self._lose()
            except PlaneAway as error:
                self._link.failed(server, error)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / REFRESHES):
                    await self._arrived.wait()

    def _lose(self) -> None:
        """The server forgot this process: its owner puts its records again."""
        log.debug("etcd lease gone", extra={"fields": {"lease": f"{self._lease:x}"}})
        self._lease = 0
        for callback in self._lost:
            callback()
