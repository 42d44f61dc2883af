"""The line to etcd: whichever server answers, dialled again for as long as it takes."""

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
from dynamo.core.errors import ConfigError, PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks, wait_for_first

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 2379
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 0.5
RETRY_DIAL_TIMEOUT_S: Final = 2.0
"""After the first failure an attempt lasts no longer, so that a server behind a healed network is
found within two seconds."""


class EtcdConnection:
    """`trouble`: why there is no server now; "" while there is one."""

    def __init__(self, servers: list[EtcdEndpoint], options: PlaneOptions, rng: Random) -> None:
        self._endpoints = servers
        self._options = options
        self._rng = rng
        self._tasks = BackgroundTasks()
        self._client: EtcdClient | None = None
        self._connected = asyncio.Event()
        self._disconnected = asyncio.Event()
        self.connection_error = "not connected yet"
        self.first_attempt_done = asyncio.Event()

    def start(self, arrived: Callable[[], None]) -> None:
        """Dial, and call `arrived` whenever a server answers anew."""
        self._tasks.start(self._run(arrived), "etcd link")

    async def close(self) -> None:
        """Hang up."""
        await self._tasks.close()

    @property
    def client(self) -> EtcdClient | None:
        """The server that answers, if one does."""
        return self._client

    async def wait_client(self) -> EtcdClient:
        """Wait for one."""
        while self._client is None:
            await self._connected.wait()
        return self._client

    def report_failure(self, server: EtcdClient, error: PlaneUnavailable) -> None:
        """`server` did not answer: look for another, or the same again."""
        if server is self._client:
            self._client = None
            self._connected.clear()
            self.connection_error = error.message
            log.warning("etcd is away", extra={"fields": {"error": error.message}})
            self._disconnected.set()

    async def _run(self, arrived: Callable[[], None]) -> None:
        delay_s, timeout_s = RETRY_S, self._options.dial_timeout_s
        for where in itertools.cycle(self._endpoints):
            server = EtcdClient(where, self._options)
            try:
                await server.open(timeout_s)
                self._on_connected(server)
                arrived()
                delay_s = RETRY_S
                await wait_for_first(self._disconnected.wait(), server.wait_disconnected())
                self.report_failure(
                    server, PlaneUnavailable(f"etcd at {where}: the connection broke")
                )
            except PlaneUnavailable as error:
                self._on_connect_failed(error)
            finally:
                self._client = None
                await server.close()
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, MAX_RETRY_S)
            timeout_s = min(timeout_s, RETRY_DIAL_TIMEOUT_S)

    def _on_connected(self, server: EtcdClient) -> None:
        log.info("etcd answers", extra={"fields": {"server": str(server.endpoint)}})
        self._disconnected.clear()
        self._client = server
        self.connection_error = ""
        self._connected.set()
        self.first_attempt_done.set()

    def _on_connect_failed(self, error: PlaneUnavailable) -> None:
        if not self.first_attempt_done.is_set():
            log.warning("etcd cannot be reached", extra={"fields": {"error": error.message}})
        self.connection_error = error.message
        self.first_attempt_done.set()


def parse_endpoints(url: str) -> tuple[list[EtcdEndpoint], str]:
    """`etcd://HOST:PORT,HOST:PORT/ROOT` (`etcds:` with TLS): the servers, and what all keys begin
    with. Raises `ConfigError`."""
    scheme, _, rest = url.partition("://")
    hosts, _, root = rest.partition("/")
    servers = []
    for one in hosts.rpartition("@")[2].split(","):
        try:
            parts = urlsplit(f"//{one}")
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}", hint="etcd://HOST:2379") from None
        if not host:
            raise ConfigError(f"{url!r} names no server", hint="etcd://HOST:2379")
        servers.append(EtcdEndpoint(host, port, scheme == "etcds"))
    return servers, f"/{root.strip('/')}" if root.strip("/") else ""
