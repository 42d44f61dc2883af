"""Sections of deployments over several hosts: worker groups, planes with servers, security."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting


class WorkerGroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of equal workers. Both settings only serve to check that groups share no device."""

    host: Annotated[
        str, setting("host of the group; groups of one host share no device", unused=True)
    ] = ""
    device_ids: Annotated[
        tuple[int, ...], setting("numbers of the host's accelerators", unused=True)
    ] = ()


class WorkersSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker groups of a deployment with one group of each kind."""

    prefill: WorkerGroupSettings = WorkerGroupSettings()
    decode: WorkerGroupSettings = WorkerGroupSettings()


class FrontendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frontend as a separate component. Its addresses are in `server`."""

    replicas: Annotated[
        int, setting("frontend processes of a host, unless `server.http_workers` is set", ge=1)
    ] = 1


class ServerTlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Credentials for a server and certificates that verify it."""

    username: Annotated[str, setting("user at the server; empty: none")] = ""
    password: Annotated[str, setting("the user's password", secret=True)] = ""
    ca: Annotated[str, setting("PEM file of the server's CA; empty: the system's CAs")] = ""
    cert: Annotated[str, setting("PEM file of this client's certificate; empty: none")] = ""
    key: Annotated[str, setting("PEM file of this client's key")] = ""


class EtcdSettings(ServerTlsSettings, frozen=True, forbid_unknown_fields=True):
    """Access to etcd."""

    endpoints: Annotated[
        tuple[str, ...],
        setting(
            "URLs of the servers (http:// or https://); if set, processes find each other there",
            aliases=("discovery.etcd_endpoints", "router.discovery.etcd_endpoints"),
        ),
    ] = ()
    dial_timeout: Annotated[
        float, setting("limit for connecting, and for one answer", unit="seconds", ge=0.1)
    ] = 5.0


class DiscoverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Discovery through a server. For discovery without one see `runtime.discovery`."""

    type: Annotated[
        str,
        setting(
            "kind of server; file: none, unless `etcd.endpoints` are set; etcd without endpoints: "
            "127.0.0.1:2379",
            choices=("file", "etcd"),
            not_yet=(("kubernetes", ""),),
        ),
    ] = "file"
    etcd: EtcdSettings = EtcdSettings()


class NatsSettings(ServerTlsSettings, frozen=True, forbid_unknown_fields=True):
    """Access to NATS."""

    servers: Annotated[
        tuple[str, ...],
        setting(
            "URLs of the servers (nats:// or tls://); if set, requests and events go through them"
        ),
    ] = ()
    keep_events: Annotated[
        float,
        setting(
            "how long JetStream keeps events for replay (stream `dynamo-events`); 0: not at all. "
            "Dynamo's own subscribers do not replay",
            unit="seconds",
            ge=0,
        ),
    ] = 0.0
    max_reconnect: Annotated[
        int, setting("quick attempts to reconnect, followed by slower ones without limit", ge=0)
    ] = 10
    reconnect_wait: Annotated[
        float,
        setting(
            "time between quick attempts; slower ones wait three times as long. Dynamo's 2 s would "
            "detect a restarted server up to 6 s late",
            unit="seconds",
            ge=0.01,
        ),
    ] = 0.5


class MessagingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests and events through a server. Without one see `runtime.requests` and `.events`."""

    type: Annotated[
        str,
        setting(
            "kind of messaging; tcp: no server, unless `nats.servers` are set; nats without "
            "servers: 127.0.0.1:4222",
            choices=("tcp", "nats"),
        ),
    ] = "tcp"
    nats: NatsSettings = NatsSettings()


class SecuritySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Authentication between the deployment's processes. For HTTP see `server`."""

    secret: Annotated[
        str,
        setting(
            "secret that all processes of the deployment share, at least 16 characters; planes "
            "that listen beyond this machine need it, or certificates",
            secret=True,
        ),
    ] = ""
    tls_ca: Annotated[
        str, setting("PEM file of the CA of all processes' certificates; TLS is mutual")
    ] = ""
    tls_cert: Annotated[str, setting("PEM file of this process's certificate")] = ""
    tls_key: Annotated[str, setting("PEM file of this process's key")] = ""
