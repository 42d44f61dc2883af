"""Discovery on etcd: one lease per process, its records, and watches that survive outages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from random import Random
from typing import Final, Self

from dynamo.communication.directory import RecordChange, RecordWatch
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.etcd_client import EtcdClient, LeaseNotFound, RevisionCompacted
from dynamo.communication.discovery.etcd_connection import EtcdConnection, parse_endpoints
from dynamo.communication.discovery.graceful_state import GracefulState
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.tls import client_tls_context
from dynamo.core.errors import PlaneUnavailable, TooLarge
from dynamo.core.tasks import BackgroundTasks, wait_at_most, wait_for_first


class EtcdWatch:
    """Pushes the changes below `prefix` to `queue`. `root` is stripped from the keys.

    After a compaction or an outage the state is read again and the differences are pushed.
    """

    def __init__(self, connection: EtcdConnection, root: str, prefix: str) -> None:
        self._connection = connection
        self._root = root
        self._prefix = root + prefix
        self._started = False
        self.queue = ChangeQueue(prefix)
        self._state = GracefulState(self._push)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                client = await self._connection.wait_client()
                try:  # gRPC does not always wake the reader of a closed channel
                    await wait_for_first(self._watch_once(client), client.closed.wait())
                except RevisionCompacted:
                    continue
                except PlaneUnavailable as error:
                    self._connection.report_failure(client, error)
        finally:
            self._state.close()

    async def _watch_once(self, client: EtcdClient) -> None:
        revision, state = await client.get_prefix(self._prefix)
        self._apply_state(state)
        async with aclosing(client.watch(self._prefix, revision + 1)) as batches:
            async for batch in batches:
                self._state.apply(batch)

    def _apply_state(self, state: Mapping[str, bytes]) -> None:
        """Push the first state, or the differences to a state that was read again."""
        if self._started:
            self._state.replace(state)
            return
        self._started = True
        self._state.records = dict(state)
        self.queue.start({self._strip_root(key): value for key, value in state.items()})

    def _push(self, changes: Sequence[RecordChange]) -> None:
        self.queue.push(
            RecordChange(self._strip_root(change.key), change.value) for change in changes
        )

    def _strip_root(self, key: str) -> str:
        return key[len(self._root) :]


log = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = 1 << 20
"""Limit of key and value together. etcd accepts requests up to 1.5 MiB."""
KEEPALIVES_PER_TTL: Final = 3
"""Keepalives sent per time-to-live of the lease."""
REVOKE_ATTEMPTS: Final = 3
"""Attempts to revoke the lease of another process, each at a server that answers."""


class EtcdDiscovery(Discovery):
    """The backend `etcd://HOST:PORT[,HOST:PORT][/ROOT]`.

    While no server answers, watches report nothing, `get` raises `PlaneUnavailable`, and writes
    wait until a server is back. The first `put` takes the lease.
    """

    def __init__(self, connection: EtcdConnection, root: str, ttl_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._root = root
        self._ttl_s = ttl_s
        self._tasks = BackgroundTasks()
        self._lease_id = 0
        self._write_lock = asyncio.Lock()
        self._pending_writes: dict[str, bytes | None] = {}
        self._reconnected = asyncio.Event()
        self._closed = False
        connection.start(self._reconnected.set)
        self._tasks.start(self._keep_lease_alive(), "etcd lease")

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Start connecting in the background. Raises `ConfigError`."""
        endpoints, root = parse_endpoints(url)
        if any(endpoint.tls for endpoint in endpoints):
            await asyncio.to_thread(client_tls_context, options.server_tls)
        return cls(EtcdConnection(endpoints, options, Random()), root, options.lease_ttl_s)

    @property
    def connection_error(self) -> str:
        return self._connection.connection_error

    async def put(self, key: str, value: bytes) -> None:
        if len(key) + len(value) > MAX_RECORD_BYTES:
            raise TooLarge(
                f"record {key[:100]!r} of {len(value)} bytes is larger than {MAX_RECORD_BYTES}"
            )
        await self._write(key, value)

    async def delete(self, key: str) -> None:
        await self._write(key, None)

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        await self._connection.first_attempt_done.wait()
        client = self._connection.client
        if client is None:
            raise PlaneUnavailable(self._connection.connection_error)
        try:
            _, state = await client.get_prefix(self._root + prefix)
        except PlaneUnavailable as error:
            self._connection.report_failure(client, error)
            raise
        return {key[len(self._root) :]: value for key, value in state.items()}

    async def revoke_lease_of(self, key: str) -> None:
        for attempts_left in reversed(range(REVOKE_ATTEMPTS)):
            client = await self._connection.wait_client()
            try:
                await client.revoke(await client.lease_of(self._root + key))
            except LeaseNotFound:
                return
            except PlaneUnavailable as error:
                self._connection.report_failure(client, error)
                if not attempts_left:
                    raise
            else:
                return

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        watch = EtcdWatch(self._connection, self._root, prefix)
        task = self._tasks.start(watch.run(), f"etcd watch {prefix}")
        try:
            yield watch.queue
        finally:
            task.cancel()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        client = self._connection.client
        if client is not None and self._lease_id:
            with suppress(PlaneUnavailable, LeaseNotFound):
                await client.revoke(self._lease_id)
        await self._connection.close()

    async def _write(self, key: str, value: bytes | None) -> None:
        """Queue a write (None deletes), and send the queue if a server is connected."""
        self._pending_writes.pop(key, None)
        self._pending_writes[key] = value
        await self._connection.first_attempt_done.wait()
        client = self._connection.client
        if client is not None:
            await self._flush_pending(client)

    async def _flush_pending(self, client: EtcdClient) -> None:
        async with self._write_lock:
            while self._pending_writes:
                key, value = next(iter(self._pending_writes.items()))
                try:
                    await self._write_record(client, self._root + key, value)
                except LeaseNotFound:
                    self._on_lease_lost()
                    continue
                except PlaneUnavailable as error:
                    self._connection.report_failure(client, error)
                    return
                if self._pending_writes.get(key, b"") is value:
                    del self._pending_writes[key]

    async def _write_record(self, client: EtcdClient, key: str, value: bytes | None) -> None:
        if value is not None:
            self._lease_id = self._lease_id or await client.grant(self._ttl_s)
            await client.put(key, value, self._lease_id)
        elif self._lease_id:
            await client.delete(key, self._lease_id)

    async def _keep_lease_alive(self) -> None:
        """Renew the lease and write pending records: periodically and after each reconnect."""
        while True:
            client = await self._connection.wait_client()
            self._reconnected.clear()
            try:
                if self._lease_id:
                    await client.keep_alive(self._lease_id)
                await self._flush_pending(client)
            except LeaseNotFound:
                self._on_lease_lost()
            except PlaneUnavailable as error:
                self._connection.report_failure(client, error)
                continue
            await wait_at_most(self._reconnected.wait(), self._ttl_s / KEEPALIVES_PER_TTL)

    def _on_lease_lost(self) -> None:
        """Report that the server does not know the lease. The callbacks put the records again."""
        log.debug("etcd lease lost", extra={"fields": {"lease": f"{self._lease_id:x}"}})
        self._lease_id = 0
        for callback in self._lease_lost_callbacks:
            callback()
