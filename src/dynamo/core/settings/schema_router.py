"""The section that says which worker gets a request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dynamo.core.plugins import ROUTER_COSTS, ROUTER_MODES
from dynamo.core.settings.declare import setting


class IndexSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What routers in mode kv know of the workers' caches."""

    budget_bytes: Annotated[
        int,
        setting(
            "memory of one index; beyond it cold branches are forgotten (15 bytes a block in long "
            "prompts)",
            unit="bytes",
            ge=1 << 20,
        ),
    ] = 256 << 20
    prediction_ttl: Annotated[
        float,
        setting(
            "how long what was sent to a worker is believed to be in its cache, where the worker "
            "sends no KV events",
            unit="seconds",
            ge=0.1,
        ),
    ] = 120.0
    shared: Annotated[
        bool,
        setting(
            "routers ask the index of `dynamo indexer` instead of keeping one each",
            flag="--shared-index",
        ),
    ] = False
    file: Annotated[
        str,
        setting("where `dynamo indexer` keeps its index over a restart; empty: nowhere"),
    ] = ""
    save_every: Annotated[
        float, setting("between two savings of that file", unit="seconds", ge=1.0)
    ] = 60.0


BASIC_MODES = ("round_robin", "random", "least_loaded", "power_of_two", "weighted_round_robin")
QUEUE_ORDERS = ("fcfs", "shortest", "deadline")
MODE_ALIASES = (
    ("basic", "round_robin"),
    ("weighted", "weighted_round_robin"),
    ("kv_aware", "kv"),
)


class RoutingStrategySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of the composite score (router.policy composite)."""

    cache_hit_weight: Annotated[float, setting("of cached prefixes", ge=0, reload=True)] = 0.4
    load_weight: Annotated[
        float, setting("of a low load", ge=0, aliases=("load_balance_weight",), reload=True)
    ] = 0.3
    latency_weight: Annotated[float, setting("of a low latency", ge=0, reload=True)] = 0.2
    memory_weight: Annotated[float, setting("of free memory", ge=0, reload=True)] = 0.1


class LoadBalancingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds where the mode leaves a choice."""

    algorithm: Annotated[
        str,
        setting(
            "between workers of equal score, in mode adaptive",
            choices=BASIC_MODES,
            spellings=MODE_ALIASES,
        ),
    ] = "random"
    health_check_interval: Annotated[
        float,
        setting(
            "between probes of a worker",
            unit="seconds",
            ge=0.1,
            aliases=("router.health_check_interval",),
        ),
    ] = 10.0
    unhealthy_threshold: Annotated[
        int, setting("probes without an answer, in a row, until a worker is ejected", ge=1)
    ] = 3


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which worker gets a request."""

    mode: Annotated[
        str,
        setting(
            "how a worker is chosen (- and _ are equal; `basic` = round_robin, `kv_aware` = kv)",
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
            "what decides in mode kv: predicted time, Dynamo's block cost, the weights of "
            "routing_strategy, time to first token alone, or where a conversation was before",
            flag="--router-policy",
            choices=tuple(ROUTER_COSTS.builtin),
            plugins=ROUTER_COSTS,
        ),
    ] = "predicted"
    selector: Annotated[
        str,
        setting(
            "how one is taken once all are scored: highest_score, weighted_random, load_balanced, "
            "or the name of an entry point in dynamo.router.selectors",
            flag="--router-selector",
        ),
    ] = "highest_score"
    temperature: Annotated[
        float,
        setting(
            "of weighted_random: the softmax over scores scaled to the distance of best and worst",
            flag="--router-temperature",
            ge=0,
        ),
    ] = 0.5
    migration_limit: Annotated[
        int,
        setting(
            "how often one request may go on at another worker when its own fails; 0: never",
            flag="--migration-limit",
            ge=0,
        ),
    ] = 16
    ttft_slo: Annotated[
        float,
        setting(
            "a first token is promised within so long: a request for which that cannot be kept is "
            "answered 503 overloaded at once; 0: no promise",
            flag="--ttft-slo",
            unit="seconds",
            ge=0,
            reload=True,
        ),
    ] = 0.0
    max_queue_wait: Annotated[
        float,
        setting(
            "without a promise: who would wait longer than that for a place at a worker is "
            "answered 503 overloaded at once",
            flag="--max-queue-wait",
            unit="seconds",
            ge=0,
            reload=True,
        ),
    ] = 30.0
    max_worker_requests: Annotated[
        int,
        setting(
            "requests that one worker is given at a time; 0: as many as its engine works on",
            flag="--max-worker-requests",
            ge=0,
            reload=True,
        ),
    ] = 0
    queue_order: Annotated[
        str,
        setting(
            "who goes first of those that wait in the router: by age, the shortest prompt by "
            "weight, or the earliest deadline; a request's priority counts in each",
            flag="--router-queue-order",
            choices=QUEUE_ORDERS,
        ),
    ] = "fcfs"
    queue_bound: Annotated[
        int,
        setting(
            "requests that may wait in the router; the next is answered 503 overloaded",
            flag="--router-queue-bound",
            ge=0,
        ),
    ] = 4096
    queue_threshold: Annotated[
        float,
        setting(
            "requests wait while every worker has more prompt tokens before it than so many of its "
            "steps take; 0: never for that",
            flag="--router-queue-threshold",
            ge=0,
        ),
    ] = 0.0
    host: Annotated[str, setting("address of the HTTP port of a router of its own")] = "127.0.0.1"
    port: Annotated[
        int,
        setting(
            "HTTP port of a router of its own (health, metrics, explain); further replicas count "
            "on from there; 0: any",
            ge=0,
            le=65535,
        ),
    ] = 8001
    replicas: Annotated[
        int,
        setting(
            "routers in processes of their own, which frontends in mode kv then ask; 0: every "
            "frontend routes by itself",
            flag="--router-replicas",
            ge=0,
            aliases=("router.workers",),
        ),
    ] = 0
    routing_strategy: RoutingStrategySettings = RoutingStrategySettings()
    load_balancing: LoadBalancingSettings = LoadBalancingSettings()
