"""The schema: every setting of the system, section by section."""

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
"""Other names of whole sections."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP surface."""

    http_host: Annotated[
        str,
        setting(
            "address to listen on; loopback unless you say otherwise",
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
            "requests in work at one frontend; more wait, then are rejected (high, because a "
            "stream costs little here: 100 would leave a fleet idle)",
            flag="--max-concurrent-requests",
            ge=1,
            reload=True,
        ),
    ] = 4096
    max_waiting_requests: Annotated[
        int, setting("requests that may wait for a place before 503 overloaded", ge=0, reload=True)
    ] = 1024
    request_timeout: Annotated[
        float,
        setting(
            "whole-request limit", flag="--request-timeout", unit="seconds", ge=0.001, reload=True
        ),
    ] = 300.0
    log_requests: Annotated[
        bool, setting("one log line a request", flag="--log-requests", reload=True)
    ] = False
    log_prompts: Annotated[
        bool,
        setting(
            "one log line a request with its text, which is never logged otherwise",
            flag="--log-prompts",
            reload=True,
        ),
    ] = False
    unknown_roles: Annotated[
        str, setting("a message of an unknown role", choices=("reject", "warn"))
    ] = "reject"
    max_body_bytes: Annotated[int, setting("largest request body", unit="bytes", ge=1024)] = (
        32 << 20
    )
    max_header_bytes: Annotated[int, setting("all headers together", unit="bytes", ge=1024)] = (
        32 << 10
    )
    max_headers: Annotated[int, setting("headers in one request", ge=8)] = 100
    header_timeout: Annotated[
        float,
        setting(
            "time from connecting to a request, to send its headers, then the body's next part",
            unit="seconds",
            ge=0.1,
        ),
    ] = 15.0
    idle_timeout: Annotated[
        float, setting("an idle kept-alive connection is closed after", unit="seconds", ge=1)
    ] = 75.0
    stream_backlog_bytes: Annotated[
        int,
        setting(
            "unsent bytes of one stream before it ends with slow_reader", unit="bytes", ge=4096
        ),
    ] = 1 << 20
    stall_s: Annotated[
        float, setting("a reader that takes nothing for so long is dropped", unit="seconds", ge=1)
    ] = 60.0
    api_keys: Annotated[
        tuple[str, ...], setting("Bearer keys that may call; empty: everybody", secret=True)
    ] = ()
    cors_origins: Annotated[tuple[str, ...], setting("origins allowed by CORS")] = ("*",)


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served."""

    path: Annotated[
        str,
        setting(
            "model folder, GGUF file or hub name; empty: the default model", flag="--model-path"
        ),
    ] = ""
    names: Annotated[
        tuple[str, ...],
        setting(
            "name(s) it is served under; more than one are aliases (`model.name` without a path "
            "beside it is the model's hub name)",
            flag="--model-name",
            aliases=("name",),
        ),
    ] = ()
    context_tokens: Annotated[
        int,
        setting(
            "longest prompt plus answer; 0: what the model says",
            flag="--max-model-len",
            unit="tokens",
            ge=0,
            aliases=("max_model_len",),
        ),
    ] = 0


class SamplingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Used where the request says nothing; these stand before the model's own defaults."""

    temperature: Annotated[
        float | None, setting("0 = greedy; else the model's, else 0.7", ge=0, le=2)
    ] = None
    top_p: Annotated[float | None, setting("nucleus; else the model's, else 0.9", ge=0, le=1)] = (
        None
    )
    top_k: Annotated[int | None, setting("0 = no limit; else the model's, else 50", ge=0)] = None
    max_tokens: Annotated[
        int | None, setting("answer length; else 1024 or what is left", unit="tokens", ge=1)
    ] = None
    stop_tokens: Annotated[tuple[str, ...], setting("strings that end every answer")] = ()


class RuntimeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Planes and life cycle."""

    namespace: Annotated[
        str,
        setting(
            "logical isolation of tenants or environments",
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
            "name of this deployment and its state folder; empty: http-PORT", flag="--deployment"
        ),
    ] = ""
    discovery: Annotated[
        str,
        setting(
            "discovery plane URL; empty: by the section `discovery`, else file: in the "
            "deployment's state folder",
            flag="--discovery",
        ),
    ] = ""
    requests: Annotated[
        str,
        setting(
            "request plane URL; empty: by `messaging`, else tcp: at `plane_host`",
            flag="--request-plane",
        ),
    ] = ""
    events: Annotated[
        str,
        setting(
            "event plane URL; empty: by `messaging`, else tcp: at `plane_host`",
            flag="--event-plane",
        ),
    ] = ""
    plane_host: Annotated[
        str,
        setting(
            "address that tcp: planes listen on; beyond loopback they need `security`",
            flag="--plane-host",
        ),
    ] = "127.0.0.1"
    public_host: Annotated[
        str,
        setting(
            "where other hosts reach this one; empty: `plane_host`, or for 0.0.0.0 the address "
            "that this machine sends by"
        ),
    ] = ""
    status_host: Annotated[str, setting("address of every process's status port")] = "127.0.0.1"
    status_port: Annotated[
        int,
        setting(
            "first status port: a process takes it, or the next free one above; 0: any free port",
            ge=0,
            le=65_000,
        ),
    ] = 0
    drain_s: Annotated[
        float, setting("SIGTERM: time for requests in flight", flag="--drain", unit="seconds", ge=0)
    ] = 30.0
    lease_ttl: Annotated[
        float,
        setting(
            "a dead process is forgotten after",
            unit="seconds",
            ge=1,
            aliases=("discovery.lease_ttl", "discovery.etcd.lease_ttl"),
        ),
    ] = 30.0


class LoggingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs."""

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
        str, setting("how a line looks", flag="--log-format", choices=("text", "json"))
    ] = "text"
    output: Annotated[
        str,
        setting(
            "where lines go; standard error today",
            choices=("stderr",),
            not_yet=(("stdout", "stderr"),),
        ),
    ] = "stderr"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything."""

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
        tuple[WorkerGroupSettings, ...], setting("workers that only compute prompts", unused=True)
    ] = ()
    decode_workers: Annotated[
        tuple[WorkerGroupSettings, ...], setting("workers that only compute answers", unused=True)
    ] = ()
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    messaging: MessagingSettings = MessagingSettings()
    security: SecuritySettings = SecuritySettings()
    logging: LoggingSettings = LoggingSettings()
