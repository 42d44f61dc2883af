"""The sections `router` and `index`: the choice of a worker for each request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.plugins import ROUTER_COSTS, ROUTER_MODES
from dynamo.core.settings.declare import setting


class IndexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The index of the workers' KV caches, for routers in mode kv."""

    budget_bytes: Annotated[
        int,
        setting(
            "memory of one index; cold branches beyond it are dropped (15 bytes a block in long "
            "prompts)",
            unit="bytes",
            ge=1 << 20,
        ),
    ] = 256 << 20
    prediction_ttl: Annotated[
        float,
        setting(
            "how long a prompt is assumed to be in the cache of its worker, for workers without KV "
            "events",
            unit="seconds",
            ge=0.1,
        ),
    ] = 120.0
    shared: Annotated[
        bool,
        setting(
            "routers use the index of `dynamo indexer` instead of one each", flag="--shared-index"
        ),
    ] = False
    file: Annotated[str, setting("file in which `dynamo indexer` saves its index; empty: none")] = (
        ""
    )
    save_every: Annotated[
        float, setting("time between two saves of that file", unit="seconds", ge=1.0)
    ] = 60.0


BASIC_MODES = ("round_robin", "random", "least_loaded", "power_of_two", "weighted_round_robin")
QUEUE_ORDERS = ("fcfs", "shortest", "deadline")
MODE_ALIASES = (("basic", "round_robin"), ("weighted", "weighted_round_robin"), ("kv_aware", "kv"))


class RoutingStrategySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of the composite score (router.policy composite)."""

    cache_hit_weight: Annotated[float, setting("weight of cached prefixes", ge=0, reload=True)] = (
        0.4
    )
    load_weight: Annotated[
        float, setting("weight of a low load", ge=0, aliases=("load_balance_weight",), reload=True)
    ] = 0.3
    latency_weight: Annotated[float, setting("weight of a low latency", ge=0, reload=True)] = 0.2
    memory_weight: Annotated[float, setting("weight of free memory", ge=0, reload=True)] = 0.1


class LoadBalancingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tie-breaking and health checks of workers."""

    algorithm: Annotated[
        str,
        setting(
            "choice between workers of equal score in mode adaptive",
            choices=BASIC_MODES,
            spellings=MODE_ALIASES,
        ),
    ] = "random"
    health_check_interval: Annotated[
        float,
        setting(
            "time between two probes of a worker",
            unit="seconds",
            ge=0.1,
            aliases=("router.health_check_interval",),
        ),
    ] = 10.0
    unhealthy_threshold: Annotated[
        int, setting("consecutive probes without an answer after which a worker is ejected", ge=1)
    ] = 3


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of a worker for each request."""

    mode: Annotated[
        str,
        setting(
            "strategy of the choice (- and _ are equal; `basic` = round_robin, `kv_aware` = kv)",
            flag="--router-mode",
            choices=tuple(ROUTER_MODES.builtin),
            plugins=ROUTER_MODES,
            spellings=MODE_ALIASES,
            aliases=("type", "load_balance_strategy", "router.routing_strategy.type"),
        ),
    ] = "round_robin"
    policy: Annotated[
        str,
        setting(
            "cost in mode kv: predicted time, Dynamo's block cost, the weights of "
            "routing_strategy (composite), predicted time to first token, or the worker that "
            "caches most of a conversation (affinity)",
            flag="--router-policy",
            choices=tuple(ROUTER_COSTS.builtin),
            plugins=ROUTER_COSTS,
        ),
    ] = "predicted"
    selector: Annotated[
        str,
        setting(
            "selection among scored workers: highest_score, weighted_random, load_balanced, or the "
            "name of an entry point in dynamo.router.selectors",
            flag="--router-selector",
        ),
    ] = "highest_score"
    temperature: Annotated[
        float,
        setting(
            "temperature of weighted_random: a softmax over scores scaled to their range",
            flag="--router-temperature",
            ge=0,
        ),
    ] = 0.5
    migration_limit: Annotated[
        int,
        setting(
            "how often a request may continue on another worker after a failure; 0: never",
            flag="--migration-limit",
            ge=0,
        ),
    ] = 16
    ttft_slo: Annotated[
        float,
        setting(
            "limit for the time to first token: a request that is predicted to exceed it gets 503 "
            "overloaded at once; 0: no limit",
            flag="--ttft-slo",
            unit="seconds",
            ge=0,
            reload=True,
        ),
    ] = 0.0
    max_queue_wait: Annotated[
        float,
        setting(
            "without ttft_slo: a request that is predicted to wait longer for a worker gets 503 "
            "overloaded at once",
            flag="--max-queue-wait",
            unit="seconds",
            ge=0,
            reload=True,
        ),
    ] = 30.0
    max_worker_requests: Annotated[
        int,
        setting(
            "largest number of requests at one worker; 0: the batch size of its engine",
            flag="--max-worker-requests",
            ge=0,
            reload=True,
        ),
    ] = 0
    queue_order: Annotated[
        str,
        setting(
            "order of requests that wait in the router: by age, the shortest prompt by weight, or "
            "the earliest deadline; each takes the request's priority into account",
            flag="--router-queue-order",
            choices=QUEUE_ORDERS,
        ),
    ] = "fcfs"
    queue_bound: Annotated[
        int,
        setting(
            "largest number of requests in the router's queue; the next gets 503 overloaded",
            flag="--router-queue-bound",
            ge=0,
        ),
    ] = 4096
    queue_threshold: Annotated[
        float,
        setting(
            "requests wait while every worker has more queued prompt tokens than this number of "
            "its steps can compute; 0: they do not wait for that",
            flag="--router-queue-threshold",
            ge=0,
        ),
    ] = 0.0
    host: Annotated[str, setting("address of the HTTP port of a separate router")] = "127.0.0.1"
    port: Annotated[
        int,
        setting(
            "HTTP port of a separate router (health, metrics, explain); further replicas use the "
            "next ports; 0: any free port",
            ge=0,
            le=65535,
        ),
    ] = 8001
    replicas: Annotated[
        int,
        setting(
            "separate router processes, which frontends in mode kv then use; 0: every frontend "
            "has its own router",
            flag="--router-replicas",
            ge=0,
            aliases=("router.workers",),
        ),
    ] = 0
    routing_strategy: RoutingStrategySettings = RoutingStrategySettings()
    load_balancing: LoadBalancingSettings = LoadBalancingSettings()
