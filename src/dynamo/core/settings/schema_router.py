"""The sections `router` and `index`: the choice of a worker for each request."""

from __future__ import annotations

from dynamo.core.plugins import OPERATORS, ROUTER_COSTS, ROUTER_MODES
from dynamo.core.settings.declare import SettingsSection, setting


class IndexSettings(SettingsSection, frozen=True):
    """The index of the workers' KV caches, for routers in mode kv."""

    budget_bytes: int = setting(
        256 << 20,
        "memory of one index; cold branches beyond it are dropped (15 bytes a block in long "
        "prompts)",
        unit="bytes",
        ge=1 << 20,
    )
    prediction_ttl: float = setting(
        120.0,
        "how long a prompt is assumed to be in the cache of its worker, for workers without KV "
        "events",
        unit="seconds",
        ge=0.1,
    )
    shared: bool = setting(
        False,
        "routers use the index of `dynamo indexer` instead of one each",
        flag="--shared-index",
    )
    file: str = setting("", "file in which `dynamo indexer` saves its index; empty: none")
    save_every: float = setting(60.0, "time between two saves of that file", unit="seconds", ge=1.0)


BASIC_MODES = ("round_robin", "random", "least_loaded", "power_of_two", "weighted_round_robin")
QUEUE_ORDER_NAMES = ("fcfs", "shortest", "deadline", "clusters")
MODE_ALIASES = (
    ("basic", "round_robin"),
    ("weighted", "weighted_round_robin"),
    ("kv_aware", "kv"),
)


class RoutingStrategySettings(SettingsSection, frozen=True):
    """Weights of the composite score (router.policy composite)."""

    cache_hit_weight: float = setting(0.4, "weight of cached prefixes", ge=0, reload=True)
    load_weight: float = setting(
        0.3, "weight of a low load", ge=0, aliases=("load_balance_weight",), reload=True
    )
    latency_weight: float = setting(0.2, "weight of a low latency", ge=0, reload=True)
    memory_weight: float = setting(0.1, "weight of free memory", ge=0, reload=True)


class LoadBalancingSettings(SettingsSection, frozen=True):
    """Tie-breaking and health checks of workers."""

    algorithm: str = setting(
        "random",
        "choice between workers of equal score in mode adaptive",
        choices=BASIC_MODES,
        spellings=MODE_ALIASES,
    )
    health_check_interval: float = setting(
        10.0,
        "time between two probes of a worker",
        unit="seconds",
        ge=0.1,
        aliases=("router.health_check_interval",),
    )
    unhealthy_threshold: int = setting(
        3, "consecutive probes without an answer after which a worker is ejected", ge=1
    )


class DisaggregationSettings(SettingsSection, frozen=True):
    """Prefill and decode of one request on different workers."""

    mode: str = setting(
        "auto",
        "which prompts a prefill worker computes. off: none; always: all; thresholds: those with "
        "more uncached tokens than prefill_length_threshold while fewer than "
        "queue_size_threshold wait; predicted: those for which that costs less time; flexible: "
        "the same, and every worker with both roles may be the other one's prefill worker. auto: "
        "predicted where workers have one role, flexible with --flexible-workers, else off. Only "
        "mode kv predicts; in other modes predicted and flexible are always",
        flag="--disagg",
        choices=("auto", "off", "always", "thresholds", "predicted", "flexible"),
        spellings=(("false", "off"),),  # YAML reads off as false
        reload=True,
    )
    enable_conditional_disagg: bool = setting(
        True, "decide for each request; else `auto` is always", reload=True
    )
    prefill_length_threshold: int = setting(
        512,
        "thresholds: largest uncached prompt of decode workers",
        unit="tokens",
        ge=0,
        reload=True,
    )
    itl_slo: float = setting(
        0.0,
        "flexible: target for the 99th percentile of the times between tokens. The router lets "
        "workers that write answers compute prompts as far as the target allows; 0: a constant "
        "price holds them back",
        flag="--itl-slo",
        unit="milliseconds",
        ge=0,
        reload=True,
    )
    queue_size_threshold: int = setting(
        10, "thresholds: waiting prompts at which decode workers compute theirs", ge=0, reload=True
    )

    @property
    def effective_mode(self) -> str:
        """The mode, with `enable_conditional_disagg` applied."""
        unconditional = self.mode == "auto" and not self.enable_conditional_disagg
        return "always" if unconditional else self.mode


class RouterSettings(SettingsSection, frozen=True):
    """The choice of a worker for each request."""

    mode: str = setting(
        "round_robin",
        "strategy of the choice (- and _ are equal; `basic` = round_robin, `kv_aware` = kv)",
        flag="--router-mode",
        choices=tuple(ROUTER_MODES.builtin),
        plugins=ROUTER_MODES,
        spellings=MODE_ALIASES,
        aliases=("type", "load_balance_strategy", "router.routing_strategy.type"),
    )
    policy: str = setting(
        "predicted",
        "cost in mode kv: predicted time, Dynamo's block cost, the weights of "
        "routing_strategy (composite), predicted time to first token, or a worker with at least "
        "half of the prompt cached and at most 500 ms of prefill to do (affinity)",
        flag="--router-policy",
        choices=tuple(ROUTER_COSTS.builtin),
        plugins=ROUTER_COSTS,
        tuned=("predicted", "argmin_ttft", "block_cost"),
    )
    selector: str = setting(
        "highest_score",
        "selection among scored workers: highest_score, weighted_random, proportional, "
        "load_balanced, or the name of an entry point in dynamo.router.selectors",
        flag="--router-selector",
    )
    temperature: float = setting(
        0.5,
        "temperature of weighted_random: a softmax over scores scaled to their range",
        flag="--router-temperature",
        ge=0,
    )
    operators: tuple[str, ...] = setting(
        (),
        "token operators in the order in which a request passes them: admission, migration and "
        "entry points in dynamo.operators. Of the first two, those that are not listed follow last",
        flag="--operators",
        plugins=OPERATORS,
    )
    migration_limit: int = setting(
        16,
        "how often a request may continue on another worker after a failure; 0: never",
        flag="--migration-limit",
        ge=0,
    )
    ttft_slo: float = setting(
        0.0,
        "limit for the time to first token: a request that is predicted to exceed it gets 503 "
        "overloaded at once; 0: no limit",
        flag="--ttft-slo",
        unit="seconds",
        ge=0,
        reload=True,
    )
    max_queue_wait: float = setting(
        30.0,
        "without ttft_slo: a request that is predicted to wait longer for a worker gets 503 "
        "overloaded at once",
        flag="--max-queue-wait",
        unit="seconds",
        ge=0,
        reload=True,
    )
    max_worker_requests: int = setting(
        0,
        "largest number of requests at one worker; 0: the batch size of its engine",
        flag="--max-worker-requests",
        ge=0,
        reload=True,
    )
    queue_order: str = setting(
        "fcfs",
        "order of requests that wait in the router; fcfs: by arrival; shortest: fewest uncached "
        "prompt tokens by priority weight; deadline: earliest deadline; clusters: similar lengths "
        "together. A step of priority counts as one second in fcfs, deadline and clusters",
        flag="--router-queue-order",
        choices=QUEUE_ORDER_NAMES,
    )
    queue_bound: int = setting(
        4096,
        "largest number of requests in the router's queue; the next gets 503 overloaded",
        flag="--router-queue-bound",
        ge=0,
    )
    queue_threshold: float = setting(
        0.0,
        "requests wait while every worker has more queued prompt tokens than this number of "
        "its steps can compute; 0: they do not wait for that",
        flag="--router-queue-threshold",
        ge=0,
    )
    host: str = setting("127.0.0.1", "address of the HTTP port of a separate router")
    port: int = setting(
        8001,
        "HTTP port of a separate router (health, metrics, explain); further replicas use the "
        "next ports; 0: any free port",
        ge=0,
        le=65535,
    )
    replicas: int = setting(
        0,
        "separate router processes, which frontends in mode kv then use; 0: every frontend "
        "has its own router",
        flag="--router-replicas",
        ge=0,
        aliases=("router.workers",),
    )
    routing_strategy: RoutingStrategySettings = RoutingStrategySettings()
    load_balancing: LoadBalancingSettings = LoadBalancingSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
