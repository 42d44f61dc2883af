"""The line to etcd: whichever server answers, dialled again for as long as it takes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from random import Random
from typing import Final
from urllib.parse import urlsplit

from dynamo.communication.discovery.etcd_server import EtcdServer, Server
from dynamo.communication.options import PlaneOptions
from dynamo.core.errors import ConfigError, PlaneAway
from dynamo.core.tasks import Tasks, first_of

log = logging.getLogger(__name__)

PORT: Final = 2379
RETRY_S: Final = 0.1
RETRY_CAP_S: Final = 0.5
REDIAL_S: Final = 2.0
"""After the first failure an attempt lasts no longer, so that a server behind a healed network is
found within two seconds."""


class EtcdLink:
    """`trouble`: why there is no server now; "" while there is one."""

    def __init__(self, servers: list[Server], options: PlaneOptions, rng: Random) -> None:
        self._servers = servers
        self._options = options
        self._rng = rng
        self._tasks = Tasks()
        self._server: EtcdServer | None = None
        self._changed = asyncio.Event()
        self._broken = asyncio.Event()
        self.trouble = "not connected yet"
        self.tried = asyncio.Event()

    def start(self, arrived: Callable[[], None]) -> None:
        """Dial, and call `arrived` whenever a server answers anew."""
        self._tasks.start(self._keep(arrived), "etcd link")

    async def close(self) -> None:
        """Hang up."""
        await self._tasks.close()

    @property
    def now(self) -> EtcdServer | None:
        """The server that answers, if one does."""
        return self._server

    async def server(self) -> EtcdServer:
        """Wait for one."""
        while self._server is None:
            await self._changed.wait()
        return self._server

    def failed(self, server: EtcdServer, error: PlaneAway) -> None:
        """`server` did not answer: look for another, or the same again."""
        if server is self._server:
            self._server = None
            self._changed.clear()
            self.trouble = error.message
            log.warning("etcd is away", extra={"fields": {"error": error.message}})
            self._broken.set()

    async def _keep(self, arrived: Callable[[], None]) -> None:
        delay_s, timeout_s = RETRY_S, self._options.dial_timeout_s
        for where in itertools.cycle(self._servers):
            server = EtcdServer(where, self._options)
            try:
                await server.open(timeout_s)
                self._present(server)
                arrived()
                delay_s = RETRY_S
                await first_of(self._broken.wait(), server.lost())
                self.failed(server, PlaneAway(f"etcd at {where}: the connection broke"))
            except PlaneAway as error:
                self._away(error)
            finally:
                self._server = None
                await server.close()
            await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, RETRY_CAP_S)
            timeout_s = min(timeout_s, REDIAL_S)

    def _present(self, server: EtcdServer) -> None:
        log.info("etcd answers", extra={"fields": {"server": str(server.where)}})
        self._broken.clear()
        self._server = server
        self.trouble = ""
        self._changed.set()
        self.tried.set()

    def _away(self, error: PlaneAway) -> None:
        if not self.tried.is_set():
            log.warning("etcd cannot be reached", extra={"fields": {"error": error.message}})
        self.trouble = error.message
        self.tried.set()


def parse_servers(url: str) -> tuple[list[Server], str]:
    """`etcd://HOST:PORT,HOST:PORT/ROOT` (`etcds:` with TLS): the servers, and what all keys begin
    with. Raises `ConfigError`."""
    scheme, _, rest = url.partition("://")
    hosts, _, root = rest.partition("/")
    servers = []
    for one in hosts.rpartition("@")[2].split(","):
        try:
            parts = urlsplit(f"//{one}")
            host, port = parts.hostname, parts.port or PORT
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}", hint="etcd://HOST:2379") from None
        if not host:
            raise ConfigError(f"{url!r} names no server", hint="etcd://HOST:2379")
        servers.append(Server(host, port, scheme == "etcds"))
    return servers, f"/{root.strip('/')}" if root.strip("/") else ""
