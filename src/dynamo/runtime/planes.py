"""Derives the URLs and options of the four planes from the settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import msgspec

from dynamo.communication.addresses import bracket_ipv6, is_loopback, parse_listen_url
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.core.errors import ConfigError
from dynamo.core.plugins import TRANSFER_BACKENDS
from dynamo.core.redaction import redact_urls
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_cluster import ServerTlsSettings
from dynamo.runtime.deployment import deployment_of

UNENCRYPTED_TEXT: Final = (
    "connections between hosts are neither hidden nor protected against alteration, because "
    "security.secret only proves who is connected"
)
UNENCRYPTED_HINT: Final = "set security.tls_ca, security.tls_cert and security.tls_key"
GRAPH_VARIABLE: Final = "DYN_PARENT_DGD_K8S_NAME"
"""Names the DynamoGraphDeployment in the pods of a graph."""
DEFAULT_ETCD_URL: Final = "etcd://127.0.0.1:2379"
DEFAULT_NATS_URL: Final = "nats://127.0.0.1:4222"


class Planes(msgspec.Struct, frozen=True):
    """The URLs of the four planes and the options to open them with. `messaging_options` are those
    of all planes but discovery."""

    discovery: str
    requests: str
    events: str
    transfer: str
    discovery_options: PlaneOptions
    messaging_options: PlaneOptions

    def redacted_urls(self) -> dict[str, str]:
        """The URLs without folders, and with `***` for users and passwords, for public output."""
        return {
            "discovery": _redact_url(self.discovery),
            "requests": _redact_url(self.requests),
            "events": _redact_url(self.events),
            "transfer": _redact_url(self.transfer),
        }

    @property
    def unencrypted(self) -> bool:
        """Whether connections to other hosts are protected by a secret alone."""
        options = self.messaging_options
        return bool(options.secret) and not options.tls and not all(map(is_loopback, self._hosts()))

    @property
    def open_to_other_users(self) -> bool:
        """Whether processes of other users of this host may call and follow these planes. In a
        folder the processes share a secret; memory planes do not listen."""
        options = self.messaging_options
        needs_secret = not self.discovery.startswith(("file:", "memory:")) and any(self._hosts())
        return needs_secret and not (options.secret or options.tls)

    @property
    def behind_service(self) -> bool:
        """Whether clients come through a Service of Kubernetes, whose proxies learn late that a pod
        leaves."""
        return self.discovery.startswith("kubernetes:")

    def _hosts(self) -> Iterator[str]:
        """The hosts on which planes listen for TCP connections."""
        for url in (self.requests, self.events):
            if url.startswith("tcp:"):
                yield parse_listen_url(url)[0]
            elif not url.startswith("memory:"):
                yield parse_listen_url(self.messaging_options.direct_url)[0]
        if self.transfer.startswith(("tcp:", "auto:", "nixl:")):
            yield parse_listen_url(self.transfer)[0]


def planes_of(settings: Settings) -> Planes:
    """The planes that the settings name. Raises `ConfigError`. `runtime.discovery`, `.requests` and
    `.events` take precedence over the servers of `discovery.etcd` and `messaging.nats`. Without
    either, pods of a graph use Kubernetes, and others need no server."""
    runtime = settings.runtime
    direct_url = f"tcp://{bracket_ipv6(runtime.plane_host)}:0"
    messaging = _nats_url(settings) or direct_url
    requests = runtime.requests or messaging
    return Planes(
        discovery=runtime.discovery
        or _etcd_url(settings)
        or _kubernetes_url(settings)
        or deployment_of(settings).discovery_url,
        requests=requests,
        events=runtime.events or messaging,
        transfer=_transfer_url(runtime.transfer, requests, direct_url),
        discovery_options=_plane_options(settings, settings.discovery.etcd, direct_url),
        messaging_options=_plane_options(settings, settings.messaging.nats, direct_url),
    )


def _transfer_url(url: str, requests: str, direct_url: str) -> str:
    """The URL of the transfer plane. Processes that call each other in memory copy there too.
    Raises `ConfigError`."""
    in_memory = requests.startswith("memory:")
    if not url and in_memory:
        return "memory:"
    scheme, _, rest = url.partition(":")
    TRANSFER_BACKENDS.check(scheme or "auto")
    if scheme == "memory" and not in_memory:
        raise ConfigError(
            f"transfer plane {url!r} copies within one process, and the workers here are several",
            hint="leave out --transfer-plane, or use auto, shm: or tcp://HOST:PORT",
            param="runtime.transfer",
        )
    if scheme in {"tcp", "auto", "nixl"}:
        parse_listen_url(url)
    if rest or scheme not in {"", "auto", "nixl"}:
        return url
    return f"{scheme or 'auto'}:{direct_url[4:]}"


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


def _kubernetes_url(settings: Settings) -> str:
    """The URL of discovery by Kubernetes if it is set, or if this is a pod of a graph."""
    in_graph = os.environ.get(GRAPH_VARIABLE) and os.environ.get("POD_UID")
    return "kubernetes:" if settings.discovery.type == "kubernetes" or in_graph else ""


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
        rdma=settings.nixl.enable_rdma,
        pool_bytes=settings.nixl.memory_pool_size,
        compression=settings.nixl.compression,
    )


def _redact_url(url: str) -> str:
    return "file:" if url.startswith("file:") else redact_urls(url)
