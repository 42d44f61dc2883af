"""The root of the settings schema, with the sections of a single host."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting
from dynamo.core.settings.schema_cluster import (
    DiscoverySettings,
    FrontendSettings,
    MessagingSettings,
    SecuritySettings,
    WorkerGroupSettings,
    WorkersSettings,
)
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_router import IndexSettings, RouterSettings

SECTION_ALIASES = {
    "kv_cache": "cache",
    "distributed_runtime.etcd": "discovery.etcd",
    "distributed_runtime.nats": "messaging.nats",
}
"""Other names of whole sections -> the section."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server."""

    http_host: Annotated[
        str,
        setting(
            "address to listen on; loopback by default",
            flag="--http-host",
            aliases=("host", "frontend.host"),
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int,
        setting(
            "port to listen on",
            flag="--http-port",
            ge=0,
            le=65535,
            aliases=("port", "frontend.port"),
        ),
    ] = 8000
    http_workers: Annotated[
        int,
        setting(
            "frontend processes that share the port",
            flag="--http-workers",
            ge=1,
            aliases=("workers",),
        ),
    ] = 1
    max_concurrent_requests: Annotated[
        int,
        setting(
            "running requests of one frontend; further ones wait, then are rejected. The value is "
            "high because a stream costs little; Dynamo's 100 would leave workers idle",
            flag="--max-concurrent-requests",
            ge=1,
            reload=True,
        ),
    ] = 4096
    max_waiting_requests: Annotated[
        int, setting("waiting requests beyond which 503 overloaded is sent", ge=0, reload=True)
    ] = 1024
    request_timeout: Annotated[
        float,
        setting(
            "limit for a whole request",
            flag="--request-timeout",
            unit="seconds",
            ge=0.001,
            reload=True,
        ),
    ] = 300.0
    log_requests: Annotated[
        bool, setting("write one log line per request", flag="--log-requests", reload=True)
    ] = False
    log_prompts: Annotated[
        bool,
        setting(
            "write one log line per request with its text, which is not logged otherwise",
            flag="--log-prompts",
            reload=True,
        ),
    ] = False
    unknown_roles: Annotated[
        str, setting("treatment of messages of an unknown role", choices=("reject", "warn"))
    ] = "reject"
    max_body_bytes: Annotated[int, setting("largest request body", unit="bytes", ge=1024)] = (
        32 << 20
    )
    max_header_bytes: Annotated[
        int, setting("largest total size of headers", unit="bytes", ge=1024)
    ] = 32 << 10
    max_headers: Annotated[int, setting("largest number of headers in one request", ge=8)] = 100
    header_timeout: Annotated[
        float,
        setting(
            "time to begin a request, to send its headers, and between parts of its body",
            unit="seconds",
            ge=0.1,
        ),
    ] = 15.0
    idle_timeout: Annotated[
        float, setting("time after which an idle connection is closed", unit="seconds", ge=1)
    ] = 75.0
    stream_backlog_bytes: Annotated[
        int, setting("unsent bytes at which a stream ends with slow_reader", unit="bytes", ge=4096)
    ] = 1 << 20
    stall_s: Annotated[
        float,
        setting("time without progress after which a reader is dropped", unit="seconds", ge=1),
    ] = 60.0
    api_keys: Annotated[
        tuple[str, ...], setting("accepted Bearer keys; empty: no key is needed", secret=True)
    ] = ()
    cors_origins: Annotated[tuple[str, ...], setting("origins allowed by CORS")] = ("*",)


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The served model."""

    path: Annotated[
        str,
        setting(
            "model folder, GGUF file or hub name; empty: the default model", flag="--model-path"
        ),
    ] = ""
    names: Annotated[
        tuple[str, ...],
        setting(
            "served name, then aliases; `model.name` in a source without a path is the model's hub "
            "name",
            flag="--model-name",
            aliases=("name",),
        ),
    ] = ()
    context_tokens: Annotated[
        int,
        setting(
            "longest prompt plus answer; 0: the model's limit",
            flag="--max-model-len",
            unit="tokens",
            ge=0,
            aliases=("max_model_len",),
        ),
    ] = 0


class SamplingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults for requests, with precedence over the model's own defaults."""

    temperature: Annotated[
        float | None, setting("0: greedy; unset: the model's, else 0.7", ge=0, le=2)
    ] = None
    top_p: Annotated[float | None, setting("nucleus; unset: the model's, else 0.9", ge=0, le=1)] = (
        None
    )
    top_k: Annotated[int | None, setting("0: no limit; unset: the model's, else 50", ge=0)] = None
    max_tokens: Annotated[
        int | None,
        setting("answer length; unset: 1024, at most the free context", unit="tokens", ge=1),
    ] = None
    stop_tokens: Annotated[tuple[str, ...], setting("strings that end every answer")] = ()


class RuntimeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Planes and life cycle of processes."""

    namespace: Annotated[
        str,
        setting(
            "isolates tenants or environments",
            flag="--namespace",
            aliases=(
                "discovery.namespace",
                "discovery.etcd.namespace",
                "router.discovery.namespace",
                "distributed_runtime.namespace",
            ),
        ),
    ] = "dynamo"
    deployment: Annotated[
        str,
        setting(
            "name of the deployment and of its state folder; empty: http-PORT", flag="--deployment"
        ),
    ] = ""
    discovery: Annotated[
        str,
        setting(
            "discovery plane URL; empty: from section `discovery`, else file: in the "
            "deployment's state folder",
            flag="--discovery",
        ),
    ] = ""
    requests: Annotated[
        str,
        setting(
            "request plane URL; empty: from section `messaging`, else tcp: on `plane_host`",
            flag="--request-plane",
        ),
    ] = ""
    events: Annotated[
        str,
        setting(
            "event plane URL; empty: from section `messaging`, else tcp: on `plane_host`",
            flag="--event-plane",
        ),
    ] = ""
    plane_host: Annotated[
        str,
        setting(
            "address on which tcp: planes listen; beyond loopback they need `security`",
            flag="--plane-host",
        ),
    ] = "127.0.0.1"
    public_host: Annotated[
        str,
        setting(
            "address at which other hosts reach this one; empty: `plane_host`, or for 0.0.0.0 the "
            "address of the outgoing interface"
        ),
    ] = ""
    status_host: Annotated[str, setting("address of the status port of each process")] = "127.0.0.1"
    status_port: Annotated[
        int,
        setting(
            "first status port; each process takes the next free one; 0: any free port",
            ge=0,
            le=65_000,
        ),
    ] = 0
    drain_s: Annotated[
        float,
        setting("time for requests in flight after SIGTERM", flag="--drain", unit="seconds", ge=0),
    ] = 30.0
    lease_ttl: Annotated[
        float,
        setting(
            "time after which a dead process is removed from discovery",
            unit="seconds",
            ge=1,
            aliases=("discovery.lease_ttl", "discovery.etcd.lease_ttl"),
        ),
    ] = 30.0


class LoggingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log lines."""

    level: Annotated[
        str,
        setting(
            "level, or levels by module in RUST_LOG's syntax (`info,dynamo.scheduling=debug`)",
            flag="--log-level",
            aliases=("server.log_level",),
            reload=True,
        ),
    ] = "info"
    format: Annotated[
        str, setting("format of log lines", flag="--log-format", choices=("text", "json"))
    ] = "text"
    output: Annotated[
        str,
        setting("destination of log lines", choices=("stderr",), not_yet=(("stdout", "stderr"),)),
    ] = "stderr"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All sections. Settings without effect are not fields (see `no_effect.py`)."""

    version: Annotated[int, setting("version of this schema", ge=1, le=1)] = 1
    server: ServerSettings = ServerSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    index: IndexSettings = IndexSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    workers: WorkersSettings = WorkersSettings()
    prefill_workers: Annotated[
        tuple[WorkerGroupSettings, ...],
        setting("groups of workers that only compute prompts", unused=True),
    ] = ()
    decode_workers: Annotated[
        tuple[WorkerGroupSettings, ...],
        setting("groups of workers that only compute answers", unused=True),
    ] = ()
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    messaging: MessagingSettings = MessagingSettings()
    security: SecuritySettings = SecuritySettings()
    logging: LoggingSettings = LoggingSettings()
