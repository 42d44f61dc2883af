"""The connection to an etcd cluster: reconnects for ever, to whichever server answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from random import Random
from typing import Final
from urllib.parse import urlsplit

from dynamo.communication.discovery.etcd_client import EtcdClient, EtcdEndpoint
from dynamo.communication.options import PlaneOptions
from dynamo.communication.outage_log import OutageLog
from dynamo.core.clock import Backoff
from dynamo.core.errors import ConfigError, PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks, wait_for_first

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 2379
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 0.5
RETRY_DIAL_TIMEOUT_S: Final = 2.0
"""Timeout of all attempts after the first: a healed network is noticed within two seconds."""


class EtcdConnection:
    """Keeps an `EtcdClient` connected to one of the servers.

    `client` is None while there is no connection. `connection_error` then says why.
    """

    def __init__(self, endpoints: list[EtcdEndpoint], options: PlaneOptions, rng: Random) -> None:
        self._endpoints = endpoints
        self._options = options
        self._rng = rng
        self._tasks = BackgroundTasks()
        self._outage_log = OutageLog("etcd", ",".join(map(str, endpoints)))
        self.client: EtcdClient | None = None
        self._connected = asyncio.Event()
        self._disconnected = asyncio.Event()
        self.connection_error = "not connected yet"
        self.first_attempt_done = asyncio.Event()

    def start(self, on_connected: Callable[[], None]) -> None:
        """Connect in the background. Calls `on_connected` after every connect."""
        self._tasks.start(self._run(on_connected), "etcd connection")

    async def close(self) -> None:
        """Disconnect."""
        await self._tasks.close()

    async def wait_client(self) -> EtcdClient:
        """Wait until a server is connected."""
        while self.client is None:
            await self._connected.wait()
        return self.client

    def report_failure(self, client: EtcdClient, error: PlaneUnavailable) -> None:
        """Drop the client after a failed call and connect again."""
        if client is self.client:
            self.client = None
            self._connected.clear()
            self.connection_error = error.message
            log.warning("connection to etcd lost", extra={"fields": {"error": error.message}})
            self._outage_log.begin()
            self._disconnected.set()

    async def _run(self, on_connected: Callable[[], None]) -> None:
        backoff, timeout_s = Backoff(RETRY_S, MAX_RETRY_S, 0.5), self._options.dial_timeout_s
        for endpoint in itertools.cycle(self._endpoints):
            client = EtcdClient(endpoint, self._options)
            try:
                await client.open(timeout_s)
                self._on_connected(client)
                on_connected()
                backoff.reset()
                await wait_for_first(self._disconnected.wait(), client.wait_disconnected())
                self.report_failure(
                    client, PlaneUnavailable(f"etcd at {endpoint}: the connection broke")
                )
            except PlaneUnavailable as error:
                self._on_connect_failed(error)
            finally:
                self.client = None
                await client.close()
            await asyncio.sleep(backoff.next_s(self._rng))
            timeout_s = min(timeout_s, RETRY_DIAL_TIMEOUT_S)

    def _on_connected(self, client: EtcdClient) -> None:
        log.info("connected to etcd", extra={"fields": {"server": str(client.endpoint)}})
        self._outage_log.end()
        self._disconnected.clear()
        self.client = client
        self.connection_error = ""
        self._connected.set()
        self.first_attempt_done.set()

    def _on_connect_failed(self, error: PlaneUnavailable) -> None:
        self._outage_log.report(error.message)
        self.connection_error = error.message
        self.first_attempt_done.set()


def parse_endpoints(url: str) -> tuple[list[EtcdEndpoint], str]:
    """Parse `etcd[s]://HOST:PORT,HOST:PORT/ROOT` to servers and root. Raises `ConfigError`."""
    scheme, _, rest = url.partition("://")
    hosts, _, root = rest.partition("/")
    endpoints = []
    for location in hosts.rpartition("@")[2].split(","):
        try:
            parts = urlsplit(f"//{location}")
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}", hint="write etcd://HOST:2379") from None
        if not host:
            raise ConfigError(f"{url!r} contains no server", hint="write etcd://HOST:2379")
        endpoints.append(EtcdEndpoint(host, port, scheme == "etcds"))
    return endpoints, f"/{root.strip('/')}" if root.strip("/") else ""
