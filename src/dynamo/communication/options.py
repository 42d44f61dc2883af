"""What the planes are opened with beside their URL: patience, secret, certificates."""

from __future__ import annotations

from typing import Any

import msgspec


class Tls(msgspec.Struct, frozen=True):
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
    tls: Tls = Tls()
    server_tls: Tls = Tls()
    user: str = ""
    password: str = ""
    host: str = ""
    keep_events_s: float = 0.0
    fallback: str = "tcp://127.0.0.1:0"
    """`nats:` requests: where the process listens too, for callers without NATS."""
    lines: dict[str, Any] | None = None
    """By URL the connections to servers that planes opened with this very dictionary share."""


DEFAULT = PlaneOptions()
