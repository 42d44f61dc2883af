"""The policy that the settings ask for, put together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dynamo.communication.events import Events
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import Router as RouterSettings
from dynamo.runtime.client import Client
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.adaptive.policy import ADAPTIVE, AdaptivePolicy
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.scheduling.router.loads import LoadView
from dynamo.scheduling.router.placing.arrival import Arrival
from dynamo.scheduling.router.placing.block_cost import BlockCost
from dynamo.scheduling.router.placing.composite import CompositeCost, Weights
from dynamo.scheduling.router.placing.costs import AffinityCost, Cost, PredictedCost, TtftCost
from dynamo.scheduling.router.placing.fleet import Fleet
from dynamo.scheduling.router.placing.placement import Placement
from dynamo.scheduling.router.placing.waiting import WaitingQueue
from dynamo.scheduling.router.policy import BasicPolicy, Policy
from dynamo.scheduling.router.prompt import ReadPrompt, prompt_reader
from dynamo.scheduling.router.selectors import SelectionStrategy, make_selector, selecting

KV = "kv"
EVENTS = ".kv_events"
QUEUE_PATIENCE_S = 10.0
"""Who has waited so long goes first, whatever the order."""


def _composite(settings: RouterSettings) -> Cost:
    weights = settings.routing_strategy
    return CompositeCost(
        Weights(
            cache_hit=weights.cache_hit_weight,
            load=weights.load_weight,
            latency=weights.latency_weight,
            memory=weights.memory_weight,
        )
    )


COSTS: dict[str, Callable[[RouterSettings], Cost]] = {
    "predicted": lambda _: PredictedCost(),
    "block_cost": lambda _: BlockCost(),
    "composite": _composite,
    "argmin_ttft": lambda _: TtftCost(),
    "affinity": lambda _: AffinityCost(),
}


def make_cost(settings: RouterSettings) -> Cost:
    """The cost that `router.policy` names. Raises ConfigError."""
    make = COSTS.get(settings.policy)
    if make is None:
        raise ConfigError(
            f"no router policy is called {settings.policy!r}", hint=f"known: {', '.join(COSTS)}"
        )
    return make(settings)


def make_placement(
    settings: RouterSettings, view: CacheView, rng: Random, fleet: Fleet | None = None
) -> Placement:
    """What places, over `view`, as the settings say. Raises ConfigError."""
    queue: WaitingQueue[Arrival] = WaitingQueue(
        settings.queue_order, settings.queue_bound, QUEUE_PATIENCE_S
    )
    named = settings.selector
    plain = named == SelectionStrategy.HighestScore
    return Placement(
        fleet or Fleet(),
        view,
        make_cost(settings),
        rng,
        select=None if plain else selecting(make_selector(named, settings.temperature, rng)),
        queue=queue,
        threshold=settings.queue_threshold,
    )


def kv_policy(
    client: Client,
    placement: Placement,
    clock: Clock,
    *,
    block_tokens: int,
    name: str = "predicted",
    read: ReadPrompt | None = None,
) -> KvPolicy:
    """The policy of mode `kv` over `placement`."""
    reader = read or prompt_reader(block_tokens)
    return KvPolicy(client, placement, reader, clock, block_tokens=block_tokens, name=name)


async def open_policy(
    settings: RouterSettings,
    client: Client,
    events: Events,
    clock: Clock,
    *,
    block_tokens: int,
    read: ReadPrompt | None = None,
    view: CacheView | None = None,
) -> Policy:
    """What chooses among `client`'s instances. In the modes `kv` and `adaptive` it follows their
    events from now on, until it is closed; in mode `kv` by `view` where that is given. Raises
    ConfigError for an unknown mode or policy."""
    component = client.path.rsplit(".", 1)[0]
    if settings.mode == ADAPTIVE:
        loads = LoadView(clock)
        await loads.follow(events, component)
        return AdaptivePolicy(client, loads, clock, settings.load_balancing.algorithm)
    if settings.mode != KV:
        return BasicPolicy(client, settings.mode)
    if view is None:
        view = CacheView(clock, block_tokens=block_tokens)
        await view.follow(events, component + EVENTS)
    placement = make_placement(settings, view, client.rng)
    policy = kv_policy(
        client, placement, clock, block_tokens=block_tokens, name=settings.policy, read=read
    )
    policy.on_close = view.close
    if view.remote:
        policy.prepare = view.prepare
    return policy
