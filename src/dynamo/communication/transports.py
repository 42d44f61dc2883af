"""Transports open connections between Dynamo processes: the interface and TCP."""

from __future__ import annotations

import asyncio
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Self

import msgspec

from dynamo.communication.addresses import (
    Address,
    advertised_host,
    is_loopback,
    new_incarnation,
    parse_address,
    parse_listen_url,
)
from dynamo.communication.link import HandshakeLink, Link
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.communication.tls import mutual_tls_contexts
from dynamo.core.errors import ConfigError

log = logging.getLogger(__name__)

MIN_SECRET_LENGTH = 16
HANDSHAKE_TIMEOUT_S: Final = 5.0
MAX_UNPROVEN_LINKS: Final = 128


TlsContexts = tuple[ssl.SSLContext | None, ssl.SSLContext | None]
"""For listening and for dialling."""


class UnprovenLinks:
    """The accepted links of a plane whose handshake is not complete, oldest first.

    Above `MAX_UNPROVEN_LINKS` the oldest is closed, so that clients with the secret get in.
    """

    def __init__(self) -> None:
        self._links: dict[HandshakeLink, None] = {}
        self._reported = False

    def add(self, link: HandshakeLink) -> None:
        """Add an accepted link."""
        self._links[link] = None
        if len(self._links) <= MAX_UNPROVEN_LINKS:
            return
        oldest = next(iter(self._links))
        self.discard(oldest)
        oldest.abort()
        if not self._reported:
            self._reported = True
            text = "connections that send no handshake are closed early: there are too many"
            log.warning(text, extra={"fields": {"limit": MAX_UNPROVEN_LINKS}})

    def discard(self, link: HandshakeLink) -> None:
        """Remove a link whose handshake is complete, or that is closed."""
        self._links.pop(link, None)
        if not self._links:
            self._reported = False


class PlaneTransport(ABC):
    """Listens for connections and dials other processes. Both ends prove `secret`. `silence_text`
    says what it means if a process does not answer."""

    secret: str
    incarnation: str
    silence_text = "no answer"

    def __init__(self) -> None:
        self.unproven_links = UnprovenLinks()

    @property
    @abstractmethod
    def address(self) -> str:
        """The address at which other processes dial this one."""

    @property
    @abstractmethod
    def is_listening(self) -> bool:
        """True once `listen` has completed."""

    @abstractmethod
    async def listen(self, accept: Callable[[], Link]) -> None:
        """Accept connections. `accept` makes the link of each one."""

    @abstractmethod
    async def dial(self, link: Link, address: str) -> None:
        """Connect `link`. Raises `OSError`, `TimeoutError`, `InstanceGone`."""

    @abstractmethod
    def stop_listening(self) -> None:
        """Accept no more connections. Open ones stay open."""

    def incarnation_of(self, address: str) -> str:
        """Return the incarnation that `address` names. Raises `InstanceGone`."""
        return parse_address(address).incarnation


class TcpPlaneTransport(PlaneTransport):
    """TCP at `tcp://HOST:PORT`, optionally with mutual TLS. Port 0 means any free port."""

    def __init__(
        self,
        host: str,
        port: int,
        options: PlaneOptions = DEFAULT_OPTIONS,
        contexts: TlsContexts = (None, None),
    ) -> None:
        super().__init__()
        self.secret = options.secret or options.folder_secret
        self.incarnation = new_incarnation()
        self._host = host
        self._advertised = Address(
            advertised_host(host, options.advertised_host), port, self.incarnation
        )
        self._server_tls, self._client_tls = contexts
        if self._client_tls is not None:  # a process without TLS waits for a frame of a handshake
            self.silence_text = "no answer, as of a process without TLS (security.tls_ca)"
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Create a transport that does not listen yet.

        Raises `ConfigError`, also if the address is reachable from other machines and neither a
        secret nor certificates are configured.
        """
        host, port = parse_listen_url(url)
        return cls(host, port, options, await open_tls(url, host, options))

    @property
    def address(self) -> str:
        return str(self._advertised)

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    async def listen(self, accept: Callable[[], Link]) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            accept,
            self._host,
            self._advertised.port,
            ssl=self._server_tls,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._server_tls else None,
        )
        port = self._server.sockets[0].getsockname()[1]
        self._advertised = msgspec.structs.replace(self._advertised, port=port)

    async def dial(self, link: Link, address: str) -> None:
        target = parse_address(address)
        loop = asyncio.get_running_loop()
        name = "" if self._client_tls is not None else None
        await loop.create_connection(
            lambda: link, target.host, target.port, ssl=self._client_tls, server_hostname=name
        )

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()


async def open_tls(url: str, host: str, options: PlaneOptions) -> TlsContexts:
    """Return the TLS contexts of a plane that listens on `host`; (None, None) without certificates.

    Raises `ConfigError`, also if other machines can reach the address and neither a secret nor
    certificates are configured.
    """
    if options.secret and len(options.secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"the secret is shorter than {MIN_SECRET_LENGTH} characters",
            hint="create one with: openssl rand -hex 32",
            param="security.secret",
        )
    if not (is_loopback(host) or options.secret or options.tls):
        raise ConfigError(
            f"{url!r} is reachable from other machines, which requires a secret",
            hint="set the same security.secret in all processes of the deployment, or "
            "certificates (security.tls_ca, security.tls_cert, security.tls_key)",
        )
    if not options.tls:
        return None, None
    return await asyncio.to_thread(mutual_tls_contexts, options.tls)
