"""Sections of deployments over several hosts: planes with servers, worker groups, monitoring."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting


class WorkerGroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers of one kind."""

    name: Annotated[str, setting("its name in logs and metrics", unused=True)] = ""
    host: Annotated[
        str, setting("where it runs; groups of one host share no device", unused=True)
    ] = ""
    model: Annotated[str, setting("else `model.path`", unused=True)] = ""
    replicas: Annotated[
        int, setting("processes of this kind; 0: one, where it stands in a list", ge=0, unused=True)
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        setting(
            "devices that share every layer",
            ge=1,
            aliases=(".model_config.tensor_parallel_size",),
            unused=True,
        ),
    ] = 1
    max_batch_size: Annotated[
        int,
        setting(
            "sequences in one batch; 0: `engine.max_num_seqs`",
            ge=0,
            aliases=(".model_config.max_batch_size",),
            unused=True,
        ),
    ] = 0
    device_ids: Annotated[
        tuple[int, ...], setting("accelerators of this host, by number", unused=True)
    ] = ()


class WorkersSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Groups of equal workers."""

    prefill: WorkerGroupSettings = WorkerGroupSettings()
    decode: WorkerGroupSettings = WorkerGroupSettings()


class FrontendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frontend as a component of its own; how it listens is said in `server`."""

    replicas: Annotated[
        int,
        setting("frontend processes of a host, where `server.http_workers` is not given", ge=1),
    ] = 1


class ServerTlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who we are to a server, and how we know it."""

    username: Annotated[str, setting("user at the server; empty: none")] = ""
    password: Annotated[str, setting("the user's password", secret=True)] = ""
    ca: Annotated[
        str, setting("PEM file of who signed the server's certificate; empty: the system's")
    ] = ""
    cert: Annotated[str, setting("PEM file of this client's certificate; empty: none")] = ""
    key: Annotated[str, setting("PEM file of this client's key")] = ""


class EtcdSettings(ServerTlsSettings, frozen=True, forbid_unknown_fields=True):
    """etcd."""

    endpoints: Annotated[
        tuple[str, ...],
        setting(
            "URLs of the servers (http:// or https://); given, they are where processes find each "
            "other",
            aliases=("discovery.etcd_endpoints", "router.discovery.etcd_endpoints"),
        ),
    ] = ()
    dial_timeout: Annotated[
        float, setting("time to connect, and for one answer", unit="seconds", ge=0.1)
    ] = 5.0


class DiscoverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is there, told by a server; without one see `runtime.discovery`."""

    type: Annotated[
        str,
        setting(
            "kind of server; file: none, unless `etcd.endpoints` are given; etcd without endpoints "
            "is 127.0.0.1:2379",
            choices=("file", "etcd"),
            not_yet=(("kubernetes", ""),),
        ),
    ] = "file"
    etcd: EtcdSettings = EtcdSettings()


class NatsSettings(ServerTlsSettings, frozen=True, forbid_unknown_fields=True):
    """NATS."""

    servers: Annotated[
        tuple[str, ...],
        setting(
            "URLs of the servers (nats:// or tls://); given, events and requests go through them"
        ),
    ] = ()
    keep_events: Annotated[
        float,
        setting(
            "how long JetStream keeps events for whoever wants to replay them (stream "
            "`dynamo-events`); 0: not at all. Our own subscribers need none of it",
            unit="seconds",
            ge=0,
        ),
    ] = 0.0
    max_reconnect: Annotated[
        int, setting("quick attempts to connect again, then slower for ever", ge=0)
    ] = 10
    reconnect_wait: Annotated[
        float,
        setting(
            "between quick attempts; slower ones wait three times as long. Dynamo's 2 s would "
            "leave a server that is back unnoticed for up to 6",
            unit="seconds",
            ge=0.01,
        ),
    ] = 0.5


class MessagingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests and events through a server; without one see `runtime.requests` and `.events`."""

    type: Annotated[
        str,
        setting(
            "kind of messaging; tcp: no server, unless `nats.servers` are given; nats without "
            "servers is 127.0.0.1:4222",
            choices=("tcp", "nats"),
        ),
    ] = "tcp"
    nats: NatsSettings = NatsSettings()


class SecuritySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between the deployment's own processes; for HTTP see `server`."""

    secret: Annotated[
        str,
        setting(
            "what every process of the deployment knows and nobody else; at least 16 characters; "
            "planes that listen beyond this machine need it, or certificates",
            secret=True,
        ),
    ] = ""
    tls_ca: Annotated[
        str, setting("PEM file of the CA that signed every process's certificate; TLS is mutual")
    ] = ""
    tls_cert: Annotated[str, setting("PEM file of this process's certificate")] = ""
    tls_key: Annotated[str, setting("PEM file of this process's key")] = ""
