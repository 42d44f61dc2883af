"""The root of the settings schema, with the sections of a single host."""

from __future__ import annotations

from msgspec.structs import replace

from dynamo.core.settings.declare import SettingsSection, setting
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_cluster import (
    DiscoverySettings,
    FrontendSettings,
    MessagingSettings,
    NixlSettings,
    SecuritySettings,
    WorkerGroupSettings,
    WorkersSettings,
)
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_models import ModelEntrySettings, ModelSettings, StoreSettings
from dynamo.core.settings.schema_monitoring import (
    AlertsSettings,
    LoggingSettings,
    MonitoringSettings,
)
from dynamo.core.settings.schema_planner import ObserverSettings, PlannerSettings, TunerSettings
from dynamo.core.settings.schema_router import IndexSettings, RouterSettings

SECTION_ALIASES = {
    "kv_cache": "cache",
    "distributed_runtime.etcd": "discovery.etcd",
    "distributed_runtime.nats": "messaging.nats",
}
"""Other names of whole sections -> the section."""


class ServerSettings(SettingsSection, frozen=True):
    """The HTTP server."""

    http_host: str = setting(
        "127.0.0.1",
        "address to listen on; loopback by default",
        flag="--http-host",
        aliases=("host", "frontend.host"),
    )
    http_port: int = setting(
        8000,
        "port to listen on",
        flag="--http-port",
        ge=0,
        le=65535,
        aliases=("port", "frontend.port"),
    )
    http_workers: int = setting(
        1,
        "frontend processes that share the port",
        flag="--http-workers",
        ge=1,
        aliases=("workers",),
    )
    max_concurrent_requests: int = setting(
        4096,
        "running requests of a model at one frontend; further ones wait, then are rejected. It is "
        "high because a stream costs little; Dynamo's 100 would leave workers idle",
        flag="--max-concurrent-requests",
        ge=1,
        reload=True,
    )
    max_waiting_requests: int = setting(
        1024, "waiting requests of a model beyond which 503 overloaded is sent", ge=0, reload=True
    )
    request_timeout: float = setting(
        300.0,
        "limit for a whole request",
        flag="--request-timeout",
        unit="seconds",
        ge=0.001,
        reload=True,
    )
    log_requests: bool = setting(
        False, "write one log line per request", flag="--log-requests", reload=True
    )
    log_prompts: bool = setting(
        False,
        "write one log line per request with its text, which is not logged otherwise",
        flag="--log-prompts",
        reload=True,
    )
    reasoning_field: str = setting(
        "both",
        "field of answers with the model's reasoning",
        choices=("both", "reasoning_content", "reasoning"),
    )
    unknown_roles: str = setting(
        "reject", "treatment of messages of an unknown role", choices=("reject", "warn")
    )
    max_body_bytes: int = setting(
        0,
        "largest request body; 0: 64 bytes for each token of the longest served context, at least "
        "4 MiB and at most 32 MiB",
        unit="bytes",
        ge=0,
    )
    max_buffered_bytes: int = setting(
        256 << 20,
        "memory of a frontend process for bodies that arrived in part, wait behind other "
        "requests of their connection or have prompts to encode; beyond it 503 is sent",
        unit="bytes",
        ge=1 << 20,
    )
    max_header_bytes: int = setting(
        32 << 10, "largest total size of headers", unit="bytes", ge=1024
    )
    max_headers: int = setting(100, "largest number of headers in one request", ge=8)
    header_timeout: float = setting(
        15.0,
        "time to begin a request, to send its headers, and between parts of its body",
        unit="seconds",
        ge=0.1,
    )
    idle_timeout: float = setting(
        75.0, "time after which an idle connection is closed", unit="seconds", ge=1
    )
    leave_s: float = setting(
        5.0,
        "time for which a frontend that is replaced or removed answers on connections without a "
        "request, with `connection: close`, before it closes them; at most runtime.drain_s. With "
        "discovery by Kubernetes it accepts new ones for as long before that",
        unit="seconds",
        ge=0,
        reload=True,
    )
    stream_backlog_bytes: int = setting(
        1 << 20, "unsent bytes at which a stream ends with slow_reader", unit="bytes", ge=4096
    )
    stall_s: float = setting(
        60.0, "time without progress after which a reader is dropped", unit="seconds", ge=1
    )
    api_keys: tuple[str, ...] = setting(
        (), "accepted Bearer keys; empty: no key is needed", secret=True
    )
    pass_api_key: bool = setting(
        False,
        "send each caller's API key on to servers behind workers (out=openai), instead of "
        "engine.url_key",
        flag="--pass-api-key",
    )
    cors_origins: tuple[str, ...] = setting(
        ("loopback",),
        "web pages that may call the server: origins such as https://app.example, `loopback` "
        "(localhost, 127.0.0.1 and [::1], any port), or `*`. Pages of other origins get 403",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which clients call the server, besides IP addresses, localhost and names "
        "without a dot; `*`: any. Empty: any, except on loopback without `api_keys`",
    )
    priority_range: tuple[int, ...] = setting(
        (0, 0), "smallest and largest `priority` of requests; others are clamped"
    )


class ResponsesSettings(SettingsSection, frozen=True):
    """Stored answers of /v1/responses, in the deployment's state folder."""

    keep: float = setting(
        30 * 86_400.0, "time after its last use when a response is deleted", unit="seconds", ge=1
    )
    max_bytes: int = setting(
        256 << 20,
        "size of all stored responses; beyond it those unused longest are deleted",
        unit="bytes",
        ge=1 << 20,
    )


class RecordSettings(SettingsSection, frozen=True):
    """The record of requests, without their words, in the deployment's state folder."""

    enabled: bool = setting(
        True,
        "record arrival, lengths, times, worker and end of each request, for `dynamo record`, "
        "`replay` and `calibrate`",
        flag="--record",
    )
    keep: float = setting(
        30 * 86_400.0, "time after which a file of the record is deleted", unit="seconds", ge=1
    )
    max_bytes: int = setting(
        256 << 20,
        "size of the record; beyond it the oldest files are deleted",
        unit="bytes",
        ge=1 << 20,
    )


class SamplingSettings(SettingsSection, frozen=True):
    """Defaults for requests, with precedence over the model's own defaults."""

    temperature: float | None = setting(
        None, "0: greedy; unset: the model's, then the engine's (own engines: 0.7)", ge=0, le=2
    )
    top_p: float | None = setting(
        None, "nucleus; unset: the model's, then the engine's (own engines: 0.9)", ge=0, le=1
    )
    top_k: int | None = setting(
        None, "0: no limit; unset: the model's, then the engine's (own engines: 50)", ge=0
    )
    max_tokens: int | None = setting(
        None, "answer length; unset: the model's, else the free context", unit="tokens", ge=1
    )
    stop_tokens: tuple[str, ...] = setting((), "strings that end every answer")


class RuntimeSettings(SettingsSection, frozen=True):
    """Planes and life cycle of processes."""

    namespace: str = setting(
        "dynamo",
        "isolates tenants or environments",
        flag="--namespace",
        aliases=(
            "discovery.namespace",
            "discovery.etcd.namespace",
            "router.discovery.namespace",
            "distributed_runtime.namespace",
        ),
    )
    deployment: str = setting(
        "", "name of the deployment and of its state folder; empty: http-PORT", flag="--deployment"
    )
    discovery: str = setting(
        "",
        "discovery plane URL; empty: from section `discovery`, else file: in the "
        "deployment's state folder",
        flag="--discovery",
    )
    requests: str = setting(
        "",
        "request plane URL; empty: from section `messaging`, else tcp: on `plane_host`",
        flag="--request-plane",
    )
    events: str = setting(
        "",
        "event plane URL; empty: from section `messaging`, else tcp: on `plane_host`",
        flag="--event-plane",
    )
    transfer: str = setting(
        "",
        "transfer plane URL, by which workers pull KV blocks of each other: auto, shm:, "
        "tcp://HOST:PORT; empty: auto, which is shared memory on one host and else TCP on "
        "`plane_host`",
        flag="--transfer-plane",
    )
    plane_host: str = setting(
        "127.0.0.1",
        "address on which tcp: planes listen; beyond loopback they need `security`",
        flag="--plane-host",
    )
    public_host: str = setting(
        "",
        "address at which other hosts reach this one; empty: `plane_host`, or for 0.0.0.0 the "
        "address of the outgoing interface",
    )
    status_host: str = setting("127.0.0.1", "address of the status port of each process")
    status_port: int = setting(
        0,
        "first status port; each process takes the next free one; 0: any free port",
        ge=0,
        le=65_000,
    )
    drain_s: float = setting(
        30.0, "time for requests in flight after SIGTERM", flag="--drain", unit="seconds", ge=0
    )
    memory: int = setting(
        0,
        "memory that the workers of this host may use together; 0: what the host or its control "
        "group leaves beside the other processes of the deployment",
        unit="bytes",
        ge=0,
    )
    lease_ttl: float = setting(
        30.0,
        "time after which a dead process is removed from discovery",
        unit="seconds",
        ge=1,
        aliases=("discovery.lease_ttl", "discovery.etcd.lease_ttl"),
    )


class Settings(SettingsSection, frozen=True):
    """All sections. Most settings without effect are not fields (see `keys.py`)."""

    version: int = setting(1, "version of this schema", ge=1, le=1)
    server: ServerSettings = ServerSettings()
    responses: ResponsesSettings = ResponsesSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    index: IndexSettings = IndexSettings()
    model: ModelSettings = ModelSettings()
    models: tuple[ModelEntrySettings, ...] = setting(
        (),
        "models that are served beside each other, instead of `model`. An entry also has the "
        "settings of `engine` and `cache`, which are those of the file where it is silent; "
        "`workers` is `engine.workers`, and `engine: NAME` is `engine.kind`",
    )
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    sampling: SamplingSettings = SamplingSettings()
    workers: WorkersSettings = WorkersSettings()
    prefill_workers: tuple[WorkerGroupSettings, ...] = setting(
        (), "groups of workers that only compute prompts"
    )
    decode_workers: tuple[WorkerGroupSettings, ...] = setting(
        (), "groups of workers that compute answers"
    )
    store: StoreSettings = StoreSettings()
    record: RecordSettings = RecordSettings()
    planner: PlannerSettings = PlannerSettings()
    tuner: TunerSettings = TunerSettings()
    observer: ObserverSettings = ObserverSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    messaging: MessagingSettings = MessagingSettings()
    security: SecuritySettings = SecuritySettings()
    nixl: NixlSettings = NixlSettings()
    logging: LoggingSettings = LoggingSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    alerts: AlertsSettings = AlertsSettings()

    @property
    def each_model(self) -> tuple[Settings, ...]:
        """The settings of the workers of each model."""
        if not self.models:
            return (self,)
        return tuple(
            replace(
                self,
                model=ModelSettings(
                    *(getattr(entry, name) for name in ModelSettings.__struct_fields__)
                ),
                engine=entry.engine,
                cache=entry.cache,
                workers=WorkersSettings(),
                prefill_workers=entry.prefill_workers,
                decode_workers=entry.decode_workers,
                models=(),
            )
            for entry in self.models
        )

    @property
    def worker_count(self) -> int:
        """Worker processes of all groups of all models."""
        if self.models:
            return sum(model.worker_count for model in self.each_model)
        groups = (self.workers.prefill, self.workers.decode)
        listed = (*self.prefill_workers, *self.decode_workers)
        return (
            self.engine.workers
            + sum(group.replicas for group in groups)
            + sum(group.replicas or 1 for group in listed)
        )
