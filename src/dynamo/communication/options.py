"""Options of the planes beside their URL: timeouts, secret, certificates."""

from __future__ import annotations

from typing import Any

import msgspec


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: the CA that signs peers, and this process's certificate and key."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert)


class PlaneOptions(msgspec.Struct, frozen=True):
    """Options for all planes.

    `secret` and `tls` protect connections between Dynamo processes. `server_tls`, `user` and
    `password` are for etcd and NATS. `advertised_host` is the host at which other machines reach a
    process that listens on every address; "" means detect it. When a server is unreachable,
    `max_reconnect` attempts are made `reconnect_wait_s` apart, then slower ones for ever.
    """

    lease_ttl_s: float = 30.0
    dial_timeout_s: float = 5.0
    max_reconnect: int = 10
    reconnect_wait_s: float = 0.5
    secret: str = ""
    tls: TlsFiles = TlsFiles()
    server_tls: TlsFiles = TlsFiles()
    user: str = ""
    password: str = ""
    advertised_host: str = ""
    event_retention_s: float = 0.0
    folder_secret: str = ""
    """Secret of the discovery folder, for connections without `secret` and `tls`."""
    rdma: bool = False
    """Whether `nixl:` may use network cards that read memory by themselves, and `auto` NIXL."""
    pool_bytes: int = 0
    """Memory for blocks of a peer that are converted after a pull; 0: the default."""
    compression: str = "none"
    """Encoding of blocks that are pulled over a slow link: none or zstd."""
    direct_url: str = "tcp://127.0.0.1:0"
    """Where the `nats:` request plane also listens, for callers that cannot reach NATS."""
    shared_clients: dict[str, Any] | None = None
    """Server clients by URL. Planes that get the same dictionary share the clients in it."""


DEFAULT_OPTIONS = PlaneOptions()
