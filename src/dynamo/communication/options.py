"""What the planes are opened with beside their URL: patience, secret, certificates."""

from __future__ import annotations

from typing import Any

import msgspec


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files. `ca`: who signs the peers' certificates; `cert` and `key`: this process's own."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert)


class PlaneOptions(msgspec.Struct, frozen=True):
    """`secret`, `tls`: between our own processes (own frames); `server_tls`, `user`, `password`:
    towards a server (etcd, NATS). `host`: where others reach this process when it listens on every
    address; empty: found. `max_reconnect` quick attempts `reconnect_wait_s` apart come first when a
    server is away, then slower ones, for ever."""

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
    direct_url: str = "tcp://127.0.0.1:0"
    """`nats:` requests: where the process listens too, for callers without NATS."""
    shared_clients: dict[str, Any] | None = None
    """By URL the connections to servers that planes opened with this very dictionary share."""


DEFAULT_OPTIONS = PlaneOptions()
