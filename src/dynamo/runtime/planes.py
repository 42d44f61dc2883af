"""Which planes the settings ask for: their URLs, and what they are opened with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from dynamo.communication.options import PlaneOptions, Tls
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import ServerTls
from dynamo.runtime.deployment import deployment_of

ETCD: Final = "etcd://127.0.0.1:2379"
_USER: Final = re.compile(r"//[^/@,]*@")
NATS: Final = "nats://127.0.0.1:4222"


class Planes(msgspec.Struct, frozen=True):
    """URLs of the three planes; `etcd`, `options`: what discovery and the other two are opened
    with."""

    discovery: str
    requests: str
    events: str
    etcd: PlaneOptions
    options: PlaneOptions

    def shown(self) -> dict[str, str]:
        """The URLs for everybody to see: without folders, users and passwords."""
        return {
            "discovery": _shown(self.discovery),
            "requests": _shown(self.requests),
            "events": _shown(self.events),
        }


def planes_of(settings: Settings) -> Planes:
    """`runtime.discovery`, `.requests`, `.events` where they are given; else the servers of
    `discovery.etcd` and `messaging.nats`; else no server. Raises `ConfigError`."""
    about = settings.runtime
    direct = f"tcp://{_bracketed(about.plane_host)}:0"
    messages = _nats_url(settings) or direct
    return Planes(
        discovery=about.discovery or _etcd_url(settings) or deployment_of(settings).discovery_url,
        requests=about.requests or messages,
        events=about.events or messages,
        etcd=_options(settings, settings.discovery.etcd, direct),
        options=_options(settings, settings.messaging.nats, direct),
    )


def _etcd_url(settings: Settings) -> str:
    endpoints = settings.discovery.etcd.endpoints
    if not endpoints:
        return ETCD if settings.discovery.type == "etcd" else ""
    schemes = {one.partition("://")[0] if "://" in one else "http" for one in endpoints}
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise ConfigError(
            f"etcd endpoints {', '.join(endpoints)}: all http:// or all https://",
            hint="http://HOST:2379",
            param="discovery.etcd.endpoints",
        )
    hosts = ",".join(one.rpartition("://")[2].rstrip("/") for one in endpoints)
    return f"{'etcds' if schemes == {'https'} else 'etcd'}://{hosts}"


def _nats_url(settings: Settings) -> str:
    servers = settings.messaging.nats.servers
    if not servers:
        return NATS if settings.messaging.type == "nats" else ""
    return ",".join(_with_scheme(servers))


def _with_scheme(servers: Sequence[str]) -> list[str]:
    """The first one's says which plane: `nats:`; `tls:` servers are told by their own."""
    found = [one if "://" in one else f"nats://{one}" for one in servers]
    return found if found[0].startswith("nats:") else [f"nats:{found[0]}", *found[1:]]


def _options(settings: Settings, server: ServerTls, direct: str) -> PlaneOptions:
    about, security = settings.runtime, settings.security
    nats = settings.messaging.nats
    return PlaneOptions(
        lease_ttl_s=about.lease_ttl,
        dial_timeout_s=settings.discovery.etcd.dial_timeout,
        max_reconnect=nats.max_reconnect,
        reconnect_wait_s=nats.reconnect_wait,
        keep_events_s=nats.keep_events,
        secret=security.secret,
        tls=Tls(security.tls_ca, security.tls_cert, security.tls_key),
        server_tls=Tls(server.ca, server.cert, server.key),
        user=server.username,
        password=server.password,
        host=about.public_host,
        fallback=direct,
    )


def _shown(url: str) -> str:
    return "file:" if url.startswith("file:") else _USER.sub("//", url)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
