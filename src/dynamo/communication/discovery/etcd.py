"""Discovery on etcd: a lease per process, records under it, watches that outlive the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from random import Random
from typing import Final, Self

from dynamo.communication.directory import RecordWatch
from dynamo.communication.discovery.etcd_client import EtcdClient, LeaseNotFound
from dynamo.communication.discovery.etcd_connection import EtcdConnection, parse_endpoints
from dynamo.communication.discovery.etcd_watch import EtcdWatch
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import PlaneUnavailable, TooLarge
from dynamo.core.tasks import BackgroundTasks

log = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = 1 << 20
"""etcd takes 1.5 MiB a request."""
KEEPALIVES_PER_TTL: Final = 3
"""In one time-to-live."""

REVOKE_ATTEMPTS: Final = 3
"""To revoke somebody else's lease, of a server that answers."""


class EtcdDiscovery(Discovery):
    """`etcd://HOST:PORT[,HOST:PORT][/ROOT]`.

    While no server answers, watches stand still, `get` raises `PlaneAway`, and what is put or
    deleted is written when one is back. The lease is taken with the first `put`.
    """

    def __init__(self, link: EtcdConnection, root: str, ttl_s: float) -> None:
        self._connection = link
        self._root = root
        self._ttl_s = ttl_s
        self._tasks = BackgroundTasks()
        self._lease_id = 0
        self._write_lock = asyncio.Lock()
        self._pending_writes: dict[str, bytes | None] = {}
        self._lease_lost_callbacks: list[Callable[[], None]] = []
        self._reconnected = asyncio.Event()
        self._closed = False
        link.start(self._reconnected.set)
        self._tasks.start(self._keep_lease_alive(), "etcd lease")

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Dialling goes on in the background. Raises `ConfigError`."""
        servers, root = parse_endpoints(url)
        if any(one.tls for one in servers):
            await asyncio.to_thread(client_tls_context, options.server_tls)
        return cls(EtcdConnection(servers, options, Random()), root, options.lease_ttl_s)

    @property
    def connection_error(self) -> str:
        return self._connection.connection_error

    async def put(self, key: str, value: bytes) -> None:
        if len(key) + len(value) > MAX_RECORD_BYTES:
            raise TooLarge(f"record {key[:100]!r} of {len(value)} bytes")
        self._pending_writes.pop(key, None)
        self._pending_writes[key] = value
        await self._flush_if_connected()

    async def delete(self, key: str) -> None:
        self._pending_writes.pop(key, None)
        self._pending_writes[key] = None
        await self._flush_if_connected()

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        await self._connection.first_attempt_done.wait()
        server = self._connection.client
        if server is None:
            raise PlaneUnavailable(self._connection.connection_error)
        try:
            _, state = await server.get_prefix(self._root + prefix)
        except PlaneUnavailable as error:
            self._connection.report_failure(server, error)
            raise
        return {key[len(self._root) :]: value for key, value in state.items()}

    async def revoke_lease_of(self, key: str) -> None:
        for left in reversed(range(REVOKE_ATTEMPTS)):
            server = await self._connection.wait_client()
            try:
                await server.revoke(await server.lease_of(self._root + key))
            except LeaseNotFound:
                return
            except PlaneUnavailable as error:
                self._connection.report_failure(server, error)
                if not left:
                    raise
            else:
                return

    def watch(self, prefix: str) -> AbstractAsyncContextManager[RecordWatch]:
        return self._watch(prefix)

    def on_lease_lost(self, callback: Callable[[], None]) -> None:
        self._lease_lost_callbacks.append(callback)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        server = self._connection.client
        if server is not None and self._lease_id:
            with suppress(PlaneUnavailable, LeaseNotFound):
                await server.revoke(self._lease_id)
        await self._connection.close()

    @asynccontextmanager
    async def _watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        kept = EtcdWatch(self._connection, self._root, prefix)
        running = self._tasks.start(kept.run(), f"etcd watch {prefix}")
        try:
            yield kept.queue
        finally:
            running.cancel()

    async def _flush_if_connected(self) -> None:
        """Write what waits, if a server answers; returns at once while none does."""
        await self._connection.first_attempt_done.wait()
        server = self._connection.client
        if server is not None:
            await self._flush_pending(server)

    async def _flush_pending(self, server: EtcdClient) -> None:
        async with self._write_lock:
            while self._pending_writes:
                key, value = next(iter(self._pending_writes.items()))
                try:
                    await self._write_record(server, self._root + key, value)
                except LeaseNotFound:
                    self._on_lease_lost()
                    continue
                except PlaneUnavailable as error:
                    self._connection.report_failure(server, error)
                    return
                if self._pending_writes.get(key, b"") is value:
                    del self._pending_writes[key]

    async def _write_record(self, server: EtcdClient, key: str, value: bytes | None) -> None:
        if value is not None:
            self._lease_id = self._lease_id or await server.grant(self._ttl_s)
            await server.put(key, value, self._lease_id)
        elif self._lease_id:
            await server.delete(key, self._lease_id)

    async def _keep_lease_alive(self) -> None:
        """Refresh it in time, and first of all whenever a server answers anew."""
        while True:
            server = await self._connection.wait_client()
            self._reconnected.clear()
            try:
                if self._lease_id:
                    await server.keep_alive(self._lease_id)
                await self._flush_pending(server)
            except LeaseNotFound:
                self._on_lease_lost()
            except PlaneUnavailable as error:
                self._connection.report_failure(server, error)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / KEEPALIVES_PER_TTL):
                    await self._reconnected.wait()

    def _on_lease_lost(self) -> None:
        """The server forgot this process: its owner puts its records again."""
        log.debug("etcd lease gone", extra={"fields": {"lease": f"{self._lease_id:x}"}})
        self._lease_id = 0
        for callback in self._lease_lost_callbacks:
            callback()
