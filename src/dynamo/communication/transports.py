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
    advertised_host,
    is_loopback,
    new_incarnation,
    parse_address,
    parse_listen_url,
)
from dynamo.communication.link import Link
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.tls import mutual_tls_contexts
from dynamo.core.errors import ConfigError

MIN_SECRET_LENGTH = 16


class PlaneTransport(ABC):
    """One process's listening end, and its way to others'. `secret`: both ends prove it."""

    secret: str
    incarnation: str

    @property
    @abstractmethod
    def address(self) -> str:
        """Where others dial this process."""

    @property
    @abstractmethod
    def is_listening(self) -> bool:
        """Somebody can dial."""

    @abstractmethod
    async def listen(self, accept: Callable[[], Link]) -> None:
        """Take connections from now on."""

    @abstractmethod
    async def dial(self, link: Link, address: str) -> None:
        """Connect `link`. Raises `OSError`, `TimeoutError`, `InstanceGone`."""

    @abstractmethod
    def stop_listening(self) -> None:
        """Take no more connections."""

    def incarnation_of(self, address: str) -> str:
        """Which process is at `address`. Raises `InstanceGone`."""
        return parse_address(address).incarnation


class TcpPlaneTransport(PlaneTransport):
    """`tcp://HOST:PORT`; port 0 is any."""

    def __init__(
        self,
        host: str,
        port: int,
        options: PlaneOptions = DEFAULT_OPTIONS,
        contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None),
    ) -> None:
        self.secret = options.secret
        self.incarnation = new_incarnation()
        self._host = host
        self._advertised = Address(
            advertised_host(host, options.advertised_host), port, self.incarnation
        )
        self._server_tls, self._client_tls = contexts
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Nothing listens yet. Raises `ConfigError`, also for an address beyond loopback without a
        secret or certificates."""
        host, port = parse_listen_url(url)
        if options.secret and len(options.secret) < MIN_SECRET_LENGTH:
            raise ConfigError(
                f"the secret is shorter than {MIN_SECRET_LENGTH} characters",
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
        return cls(host, port, options, await asyncio.to_thread(mutual_tls_contexts, options.tls))

    @property
    def address(self) -> str:
        return str(self._advertised)

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            accept, self._host, self._advertised.port, ssl=self._server_tls
        )
        port = self._server.sockets[0].getsockname()[1]
        self._advertised = msgspec.structs.replace(self._advertised, port=port)

    async def dial(self, link: Link, address: str) -> None:
        there = parse_address(address)
        loop = asyncio.get_running_loop()
        name = "" if self._client_tls is not None else None
        await loop.create_connection(
            lambda: link, there.host, there.port, ssl=self._client_tls, server_hostname=name
        )

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
