"""How connections between our own processes come to be. Over TCP here; NATS has its own."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import msgspec

from dynamo.communication.addresses import (
    Address,
    is_loopback,
    new_incarnation,
    parse_address,
    parse_listen,
    reachable_host,
)
from dynamo.communication.link import Link
from dynamo.communication.options import DEFAULT, PlaneOptions
from dynamo.communication.tls import mutual_contexts
from dynamo.core.errors import ConfigError

MIN_SECRET = 16


class Wires(ABC):
    """One process's listening end, and its way to others'. `secret`: both ends prove it."""

    secret: str
    incarnation: str

    @property
    @abstractmethod
    def address(self) -> str:
        """Where others dial this process."""

    @property
    @abstractmethod
    def listening(self) -> bool:
        """Somebody can dial."""

    @abstractmethod
    async def listen(self, accept: Callable[[], Link]) -> None:
        """Take connections from now on."""

    @abstractmethod
    async def dial(self, link: Link, address: str) -> None:
        """Connect `link`. Raises `OSError`, `TimeoutError`, `InstanceGone`."""

    @abstractmethod
    def stop(self) -> None:
        """Take no more connections."""

    def incarnation_of(self, address: str) -> str:
        """Which process is at `address`. Raises `InstanceGone`."""
        return parse_address(address).incarnation


class TcpWires(Wires):
    """`tcp://HOST:PORT`; port 0 is any."""

    def __init__(
        self,
        host: str,
        port: int,
        options: PlaneOptions = DEFAULT,
        contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None),
    ) -> None:
        self.secret = options.secret
        self.incarnation = new_incarnation()
        self._host = host
        self._public = Address(reachable_host(host, options.host), port, self.incarnation)
        self._accepts, self._dials = contexts
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT) -> Self:
        """Nothing listens yet. Raises `ConfigError`, also for an address beyond loopback without a
        secret or certificates."""
        host, port = parse_listen(url)
        if options.secret and len(options.secret) < MIN_SECRET:
            raise ConfigError(
                f"the secret is shorter than {MIN_SECRET} characters",
                hint="make one by: openssl rand -hex 32",
                param="security.secret",
            )
        if not (is_loopback(host) or options.secret or options.tls):
            raise ConfigError(
                f"{url!r} listens beyond this machine, which needs a secret",
                hint="the same security.secret for all of the deployment, or certificates "
                "(security.tls_ca, security.tls_cert, security.tls_key)",
            )
        if not options.tls:
            return cls(host, port, options)
        return cls(host, port, options, await asyncio.to_thread(mutual_contexts, options.tls))

    @property
    def address(self) -> str:
        return str(self._public)

    @property
    def listening(self) -> bool:
        return self._server is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            accept, self._host, self._public.port, ssl=self._accepts
        )
        port = self._server.sockets[0].getsockname()[1]
        self._public = msgspec.structs.replace(self._public, port=port)

    async def dial(self, link: Link, address: str) -> None:
        there = parse_address(address)
        loop = asyncio.get_running_loop()
        name = "" if self._dials is not None else None
        await loop.create_connection(
            lambda: link, there.host, there.port, ssl=self._dials, server_hostname=name
        )

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
