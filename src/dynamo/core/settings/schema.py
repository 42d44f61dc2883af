"""The schema: every setting of the system, section by section."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.settings.declare import setting

ROUTER_MODES = ("round_robin", "random", "least_loaded", "power_of_two", "weighted_round_robin")


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP surface."""

    http_host: Annotated[
        str,
        setting(
            "address to listen on; loopback unless you say otherwise",
            flag="--http-host",
            aliases=("host",),
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int,
        setting("port to listen on", flag="--http-port", ge=0, le=65535, aliases=("port",)),
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
        setting("time to send the headers, then the body's next part", unit="seconds", ge=0.1),
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


class Router(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which worker gets a request."""

    mode: Annotated[
        str,
        setting(
            "how a worker is chosen (- and _ are equal; `basic` = round_robin)",
            flag="--router-mode",
            choices=ROUTER_MODES,
            spellings=(("basic", "round_robin"), ("weighted", "weighted_round_robin")),
            aliases=("type", "load_balance_strategy"),
        ),
    ] = "round_robin"


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served."""

    path: Annotated[
        str, setting("model folder, GGUF file or hub name; empty: the default model")
    ] = ""
    names: Annotated[
        tuple[str, ...],
        setting("name(s) it is served under; more than one are aliases", flag="--model-name"),
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


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workers' engine."""

    kind: Annotated[str, setting("what computes: native, mock or echo")] = "native"
    workers: Annotated[int, setting("worker processes", flag="--workers", ge=0)] = 1
    num_blocks: Annotated[
        int,
        setting(
            "KV cache blocks; 0: what the engine finds right (mock 16,384; native: by memory)",
            flag="--num-blocks",
            unit="blocks",
            ge=0,
        ),
    ] = 0
    block_size: Annotated[
        int, setting("tokens in one KV block", flag="--block-size", unit="tokens", ge=1, le=1024)
    ] = 16
    max_num_seqs: Annotated[
        int, setting("sequences in one batch; 0: the engine's default", flag="--max-num-seqs", ge=0)
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        setting(
            "tokens computed in one step; 0: the engine's default",
            flag="--max-num-batched-tokens",
            unit="tokens",
            ge=0,
        ),
    ] = 0
    prefix_caching: Annotated[bool, setting("keep finished blocks for later prompts")] = True
    threads: Annotated[
        int, setting("threads of one native worker; 0: all cores", flag="--threads", ge=0)
    ] = 0
    timing: Annotated[
        str,
        setting(
            "mock: `dynamo`, `constant:MS_PER_PROMPT_TOKEN,MS_PER_STEP`, or a JSON file",
            flag="--timing",
        ),
    ] = "dynamo"
    speedup_ratio: Annotated[
        float, setting("mock: modelled time is divided by this", flag="--speedup-ratio", ge=1e-6)
    ] = 1.0


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class Runtime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Planes and life cycle."""

    namespace: Annotated[
        str, setting("logical isolation of tenants or environments", flag="--namespace")
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
            "discovery plane URL; empty: file: in the deployment's state folder", flag="--discovery"
        ),
    ] = ""
    requests: Annotated[str, setting("request plane URL", flag="--request-plane")] = (
        "tcp://127.0.0.1:0"
    )
    events: Annotated[str, setting("event plane URL", flag="--event-plane")] = "tcp://127.0.0.1:0"
    status_host: Annotated[str, setting("address of every process's status port")] = "127.0.0.1"
    drain_s: Annotated[
        float, setting("SIGTERM: time for requests in flight", flag="--drain", unit="seconds", ge=0)
    ] = 30.0
    lease_ttl: Annotated[
        float, setting("a dead process is forgotten after", unit="seconds", ge=1)
    ] = 30.0


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs."""

    level: Annotated[
        str,
        setting(
            "level, or levels by module in RUST_LOG's syntax (`info,dynamo.scheduling=debug`)",
            flag="--log-level",
            reload=True,
        ),
    ] = "info"
    format: Annotated[
        str, setting("how a line looks", flag="--log-format", choices=("text", "json"))
    ] = "text"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything."""

    version: Annotated[int, setting("version of this schema", ge=1, le=1)] = 1
    server: Server = Server()
    router: Router = Router()
    model: Model = Model()
    engine: Engine = Engine()
    sampling: SamplingDefaults = SamplingDefaults()
    runtime: Runtime = Runtime()
    logging: Logging = Logging()
