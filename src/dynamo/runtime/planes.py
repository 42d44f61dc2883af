"""Which planes the settings ask for: their URLs, and what they are opened with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import ServerTlsSettings
from dynamo.runtime.deployment import deployment_of

DEFAULT_ETCD_URL: Final = "etcd://127.0.0.1:2379"
_URL_CREDENTIALS: Final = re.compile(r"//[^/@,]*@")
DEFAULT_NATS_URL: Final = "nats://127.0.0.1:4222"


class Planes(msgspec.Struct, frozen=True):
    """URLs of the three planes; `etcd`, `options`: what discovery and the other two are opened
    with."""

    discovery: str
    requests: str
    events: str
    discovery_options: PlaneOptions
    messaging_options: PlaneOptions

    def redacted_urls(self) -> dict[str, str]:
        """The URLs for everybody to see: without folders, users and passwords."""
        return {
            "discovery": _redact_url(self.discovery),
            "requests": _redact_url(self.requests),
            "events": _redact_url(self.events),
        }


def planes_of(settings: Settings) -> Planes:
    """`runtime.discovery`, `.requests`, `.events` where they are given; else the servers of
    `discovery.etcd` and `messaging.nats`; else no server. Raises `ConfigError`."""
    about = settings.runtime
    direct = f"tcp://{_bracket_ipv6(about.plane_host)}:0"
    messages = _nats_url(settings) or direct
    return Planes(
        discovery=about.discovery or _etcd_url(settings) or deployment_of(settings).discovery_url,
        requests=about.requests or messages,
        events=about.events or messages,
        discovery_options=_plane_options(settings, settings.discovery.etcd, direct),
        messaging_options=_plane_options(settings, settings.messaging.nats, direct),
    )


def _etcd_url(settings: Settings) -> str:
    endpoints = settings.discovery.etcd.endpoints
    if not endpoints:
        return DEFAULT_ETCD_URL if settings.discovery.type == "etcd" else ""
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
        return DEFAULT_NATS_URL if settings.messaging.type == "nats" else ""
    return ",".join(_add_schemes(servers))


def _add_schemes(servers: Sequence[str]) -> list[str]:
    """The first one's says which plane: `nats:`; `tls:` servers are told by their own."""
    found = [one if "://" in one else f"nats://{one}" for one in servers]
    return found if found[0].startswith("nats:") else [f"nats:{found[0]}", *found[1:]]


def _plane_options(settings: Settings, server: ServerTlsSettings, direct: str) -> PlaneOptions:
    about, security = settings.runtime, settings.security
    nats = settings.messaging.nats
    return PlaneOptions(
        lease_ttl_s=about.lease_ttl,
        dial_timeout_s=settings.discovery.etcd.dial_timeout,
        max_reconnect=nats.max_reconnect,
        reconnect_wait_s=nats.reconnect_wait,
        event_retention_s=nats.keep_events,
        secret=security.secret,
        tls=TlsFiles(security.tls_ca, security.tls_cert, security.tls_key),
        server_tls=TlsFiles(server.ca, server.cert, server.key),
        user=server.username,
        password=server.password,
        advertised_host=about.public_host,
        direct_url=direct,
    )


def _redact_url(url: str) -> str:
    return "file:" if url.startswith("file:") else _URL_CREDENTIALS.sub("//", url)


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
