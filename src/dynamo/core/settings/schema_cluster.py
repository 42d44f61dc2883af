"""Sections of deployments over several hosts: worker groups, planes with servers, security."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dynamo.core.settings.declare import SettingsSection, setting

T = TypeVar("T", bound=SettingsSection)
NO_LZ4 = (("lz4", "none"),)
"""lz4 does not make KV smaller."""


class GroupNixlSettings(SettingsSection, frozen=True):
    """Transfer of KV blocks to and from one group of workers."""

    enable_rdma: bool | None = setting(None, "null: as `nixl.enable_rdma`")
    memory_pool_size: int = setting(0, "0: as `nixl.memory_pool_size`", unit="bytes", ge=0)
    compression: str | None = setting(
        None, "null: as `nixl.compression`", choices=("none", "zstd"), not_yet=NO_LZ4
    )


class GroupCacheSettings(SettingsSection, frozen=True):
    """The KV cache of one group of workers."""

    max_cache_size: int = setting(0, "0: as `cache.max_cache_size`", unit="bytes", ge=0)
    enable_offloading: bool | None = setting(None, "null: as `cache.enable_offloading`")
    offload_targets: tuple[str, ...] = setting((), "empty: as `cache.offload_targets`")


def override(section: T, of_group: SettingsSection) -> T:
    """Return a section with the values that a group sets. Empty ones are those of all workers."""
    values = msgspec.structs.asdict(of_group)
    changes = {name: value for name, value in values.items() if value or value is False}
    return msgspec.structs.replace(section, **changes)


class WorkerGroupSettings(SettingsSection, frozen=True):
    """A group of equal workers. `host` only serves to check that groups share no device: all groups
    start on this host."""

    name: str = setting("", "name of the processes; empty: prefill-worker or decode-worker")
    model: str = setting("", "model of the group; empty: `model.path`")
    replicas: int = setting(0, "processes of the group; 0 in a list: one", ge=0)
    max_batch_size: int = setting(
        0,
        "sequences in one batch; 0: `engine.max_num_seqs`",
        ge=0,
        aliases=(".model_config.max_batch_size",),
    )
    block_size: int = setting(
        0,
        "tokens in one KV block, equal in all groups of a model; 0: `engine.block_size`",
        unit="tokens",
        ge=0,
        aliases=(".kv_cache.block_size",),
    )
    host: str = setting("", "host of the group; groups of one host share no device", unused=True)
    device_ids: tuple[int, ...] = setting(
        (),
        "numbers of the host's accelerators, divided among the group; empty: `engine.device_ids`",
    )
    tensor_parallel_size: int = setting(
        0,
        "devices that share every layer; 0: `engine.tensor_parallel_size`",
        ge=0,
        aliases=(".model_config.tensor_parallel_size",),
    )
    nixl: GroupNixlSettings = GroupNixlSettings()
    kv_cache: GroupCacheSettings = GroupCacheSettings()


class PrefillGroupSettings(WorkerGroupSettings, frozen=True):
    """The group of workers that only compute prompts."""

    replicas: int = setting(
        0, "workers that only compute prompts, for decode workers", flag="--prefill-workers", ge=0
    )


class DecodeGroupSettings(WorkerGroupSettings, frozen=True):
    """The group of workers that compute answers."""

    replicas: int = setting(
        0,
        "workers that compute answers, and prompts where no prefill worker does",
        flag="--decode-workers",
        ge=0,
    )


class WorkersSettings(SettingsSection, frozen=True):
    """The worker groups of a deployment with one group of each kind. With groups, `engine.workers`
    has no default."""

    prefill: PrefillGroupSettings = PrefillGroupSettings()
    decode: DecodeGroupSettings = DecodeGroupSettings()
    flexible: int = setting(
        0,
        "workers that compute prompts for each other (router.disaggregation.mode flexible)",
        flag="--flexible-workers",
        ge=0,
    )


class NixlSettings(SettingsSection, frozen=True):
    """Transfer of KV blocks between workers."""

    compression: str = setting(
        "none",
        "encoding of blocks that a worker pulls over `tcp:`, where the link is so slow that it "
        "pays. zstd is lossless",
        choices=("none", "zstd"),
        not_yet=NO_LZ4,
    )

    enable_rdma: bool = setting(
        False, "let `nixl:` use network cards that read memory by themselves, and `auto` try NIXL"
    )
    memory_pool_size: int = setting(
        0,
        "memory for blocks of a peer that are converted after a pull; 0: 16 MiB for each peer",
        unit="bytes",
        ge=0,
    )


class FrontendSettings(SettingsSection, frozen=True):
    """The frontend as a separate component. Its addresses are in `server`."""

    replicas: int = setting(
        1, "frontend processes of a host, unless `server.http_workers` is set", ge=1
    )


class ServerTlsSettings(SettingsSection, frozen=True):
    """Credentials for a server and certificates that verify it."""

    username: str = setting("", "user at the server; empty: none")
    password: str = setting("", "the user's password", secret=True)
    ca: str = setting("", "PEM file of the server's CA; empty: the system's CAs")
    cert: str = setting("", "PEM file of this client's certificate; empty: none")
    key: str = setting("", "PEM file of this client's key")


class EtcdSettings(ServerTlsSettings, frozen=True):
    """Access to etcd."""

    endpoints: tuple[str, ...] = setting(
        (),
        "URLs of the servers (http:// or https://); if set, processes find each other there",
        aliases=("discovery.etcd_endpoints", "router.discovery.etcd_endpoints"),
    )
    dial_timeout: float = setting(
        5.0, "limit for connecting, and for one answer", unit="seconds", ge=0.1
    )


class DiscoverySettings(SettingsSection, frozen=True):
    """Discovery through a server. For discovery without one see `runtime.discovery`."""

    type: str = setting(
        "file",
        "kind of server; file: none, unless `etcd.endpoints` are set; etcd without endpoints: "
        "127.0.0.1:2379; kubernetes: the API server of the cluster, which pods of a graph use "
        "unless another one is set",
        choices=("file", "etcd", "kubernetes"),
    )
    etcd: EtcdSettings = EtcdSettings()


class NatsSettings(ServerTlsSettings, frozen=True):
    """Access to NATS."""

    servers: tuple[str, ...] = setting(
        (), "URLs of the servers (nats:// or tls://); if set, requests and events go through them"
    )
    keep_events: float = setting(
        0.0,
        "how long JetStream keeps events for replay (stream `dynamo-events`); 0: not at all. "
        "Dynamo's own subscribers do not replay",
        unit="seconds",
        ge=0,
    )
    max_reconnect: int = setting(
        10, "quick attempts to reconnect, followed by slower ones without limit", ge=0
    )
    reconnect_wait: float = setting(
        0.5,
        "time between quick attempts; slower ones wait three times as long. Dynamo's 2 s would "
        "detect a restarted server up to 6 s late",
        unit="seconds",
        ge=0.01,
    )


class MessagingSettings(SettingsSection, frozen=True):
    """Requests and events through a server. Without one see `runtime.requests` and `.events`."""

    type: str = setting(
        "tcp",
        "kind of messaging; tcp: no server, unless `nats.servers` are set; nats without "
        "servers: 127.0.0.1:4222",
        choices=("tcp", "nats"),
    )
    nats: NatsSettings = NatsSettings()


class SecuritySettings(SettingsSection, frozen=True):
    """Authentication between the deployment's processes. For HTTP see `server`."""

    secret: str = setting(
        "",
        "secret that all processes of the deployment share, at least 16 characters; planes "
        "that listen beyond this machine need it, or certificates. It proves who is connected; "
        "only TLS hides and protects what is sent. Empty: that of a `file:` discovery folder",
        secret=True,
    )
    tls_ca: str = setting(
        "",
        "PEM file of the CA of all processes' certificates; TLS is mutual, and host names are "
        "not checked",
    )
    tls_cert: str = setting("", "PEM file of this process's certificate")
    tls_key: str = setting("", "PEM file of this process's key")
