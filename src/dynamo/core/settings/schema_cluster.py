"""Sections of deployments over several hosts: worker groups, planes with servers, security."""

from __future__ import annotations

from dynamo.core.settings.declare import SettingsSection, setting


class WorkerGroupSettings(SettingsSection, frozen=True):
    """A group of equal workers. `host` and `device_ids` only serve to check that groups share no
    device: all groups start on this host."""

    name: str = setting("", "name of the processes; empty: prefill-worker or decode-worker")
    replicas: int = setting(0, "processes of the group; 0 in a list: one", ge=0)
    max_batch_size: int = setting(
        0,
        "sequences in one batch; 0: `engine.max_num_seqs`",
        ge=0,
        aliases=(".model_config.max_batch_size",),
    )
    host: str = setting("", "host of the group; groups of one host share no device", unused=True)
    device_ids: tuple[int, ...] = setting((), "numbers of the host's accelerators", unused=True)


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
        "127.0.0.1:2379",
        choices=("file", "etcd"),
        not_yet=(("kubernetes", ""),),
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
    tls_ca: str = setting("", "PEM file of the CA of all processes' certificates; TLS is mutual")
    tls_cert: str = setting("", "PEM file of this process's certificate")
    tls_key: str = setting("", "PEM file of this process's key")
