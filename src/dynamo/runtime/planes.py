"""Derives the URLs and options of the three planes from the settings."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.core.errors import ConfigError
from dynamo.core.redaction import redact_urls
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import ServerTlsSettings
from dynamo.runtime.deployment import deployment_of

DEFAULT_ETCD_URL: Final = "etcd://127.0.0.1:2379"
DEFAULT_NATS_URL: Final = "nats://127.0.0.1:4222"


class Planes(msgspec.Struct, frozen=True):
    """The URLs of the three planes and the options to open them with. `messaging_options` are those
    of the request plane and the event plane."""

    discovery: str
    requests: str
    events: str
    discovery_options: PlaneOptions
    messaging_options: PlaneOptions

    def redacted_urls(self) -> dict[str, str]:
        """The URLs without folders, and with `***` for users and passwords, for public output."""
        return {
            "discovery": _redact_url(self.discovery),
            "requests": _redact_url(self.requests),
            "events": _redact_url(self.events),
        }


def planes_of(settings: Settings) -> Planes:
    """The planes that the settings name. Raises `ConfigError`. `runtime.discovery`, `.requests` and
    `.events` take precedence over the servers of `discovery.etcd` and `messaging.nats`. Without
    either, the planes need no server."""
    runtime = settings.runtime
    direct_url = f"tcp://{bracket_ipv6(runtime.plane_host)}:0"
    messaging = _nats_url(settings) or direct_url
    return Planes(
        discovery=runtime.discovery or _etcd_url(settings) or deployment_of(settings).discovery_url,
        requests=runtime.requests or messaging,
        events=runtime.events or messaging,
        discovery_options=_plane_options(settings, settings.discovery.etcd, direct_url),
        messaging_options=_plane_options(settings, settings.messaging.nats, direct_url),
    )


def _etcd_url(settings: Settings) -> str:
    endpoints = settings.discovery.etcd.endpoints
    if not endpoints:
        return DEFAULT_ETCD_URL if settings.discovery.type == "etcd" else ""
    schemes = {url.partition("://")[0] if "://" in url else "http" for url in endpoints}
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise ConfigError(
            f"the etcd endpoints {', '.join(endpoints)} must be all http:// or all https://",
            hint="write http://HOST:2379",
            param="discovery.etcd.endpoints",
        )
    hosts = ",".join(url.rpartition("://")[2].rstrip("/") for url in endpoints)
    return f"{'etcds' if schemes == {'https'} else 'etcd'}://{hosts}"


def _nats_url(settings: Settings) -> str:
    servers = settings.messaging.nats.servers
    if not servers:
        return DEFAULT_NATS_URL if settings.messaging.type == "nats" else ""
    url = ",".join(server if "://" in server else f"nats://{server}" for server in servers)
    return url if url.startswith("nats:") else f"nats:{url}"  # `nats:` selects the plane


def _plane_options(settings: Settings, server: ServerTlsSettings, direct_url: str) -> PlaneOptions:
    runtime, security = settings.runtime, settings.security
    nats = settings.messaging.nats
    return PlaneOptions(
        lease_ttl_s=runtime.lease_ttl,
        dial_timeout_s=settings.discovery.etcd.dial_timeout,
        max_reconnect=nats.max_reconnect,
        reconnect_wait_s=nats.reconnect_wait,
        event_retention_s=nats.keep_events,
        secret=security.secret,
        tls=TlsFiles(security.tls_ca, security.tls_cert, security.tls_key),
        server_tls=TlsFiles(server.ca, server.cert, server.key),
        user=server.username,
        password=server.password,
        advertised_host=runtime.public_host,
        direct_url=direct_url,
    )


def _redact_url(url: str) -> str:
    return "file:" if url.startswith("file:") else redact_urls(url)


def bracket_ipv6(host: str) -> str:
    """Add brackets to an IPv6 address; other hosts stay as they are."""
    return f"[{host}]" if ":" in host else host
