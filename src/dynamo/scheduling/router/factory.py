"""The policy that the settings ask for, put together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dynamo.communication.events import Events
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.runtime.calls.client import Client
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.affinity import AffinityCost
from dynamo.scheduling.router.costs.block_cost import BlockCost
from dynamo.scheduling.router.costs.composite import CompositeCost
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.costs.predicted import PredictedCost, TtftCost
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.queue import WaitingQueue
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE, AdaptivePolicy
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.scheduling.router.policy import BasicPolicy, Policy
from dynamo.scheduling.router.prompt import PromptReader, make_prompt_reader
from dynamo.scheduling.router.replicas.peer_requests import PeerRequests
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.selectors import SelectionStrategy, adapt_selector, make_selector
from dynamo.scheduling.router.worker_state import WorkerStates

KV = "kv"
KV_EVENTS_SUFFIX = ".kv_events"
QUEUE_STARVATION_S = 10.0
"""Who has waited so long goes first, whatever the order."""


COSTS: dict[str, Callable[[RouterSettings], Cost]] = {
    "predicted": lambda _: PredictedCost(),
    "block_cost": lambda _: BlockCost(),
    "composite": CompositeCost.from_settings,
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


def make_solver(
    settings: RouterSettings, view: CacheView, rng: Random, fleet: WorkerStates | None = None
) -> PlacementSolver:
    """What places, over `view`, as the settings say. Raises ConfigError."""
    queue: WaitingQueue[PendingRequest] = WaitingQueue(
        settings.queue_order, settings.queue_bound, QUEUE_STARVATION_S
    )
    named = settings.selector
    plain = named == SelectionStrategy.HighestScore
    return PlacementSolver(
        fleet or WorkerStates(),
        view,
        make_cost(settings),
        rng,
        select=None if plain else adapt_selector(make_selector(named, settings.temperature, rng)),
        queue=queue,
        threshold=settings.queue_threshold,
    )


def make_kv_policy(
    client: Client,
    placement: PlacementSolver,
    clock: Clock,
    *,
    block_tokens: int,
    name: str = "predicted",
    read_prompt: PromptReader | None = None,
) -> KvPolicy:
    """The policy of mode `kv` over `placement`."""
    reader = read_prompt or make_prompt_reader(block_tokens)
    return KvPolicy(client, placement, reader, clock, block_tokens=block_tokens, name=name)


async def open_policy(
    settings: RouterSettings,
    client: Client,
    events: Events,
    clock: Clock,
    *,
    block_tokens: int,
    read_prompt: PromptReader | None = None,
    view: CacheView | None = None,
) -> Policy:
    """What chooses among `client`'s instances. In the modes `kv` and `adaptive` it follows their
    events from now on, until it is closed; in mode `kv` by `view` where that is given. Raises
    ConfigError for an unknown mode or policy."""
    component = client.path.rsplit(".", 1)[0]
    if settings.mode == ADAPTIVE:
        loads = LoadView(clock)
        await loads.subscribe(events, component)
        return AdaptivePolicy(client, loads, clock, settings.load_balancing.algorithm)
    if settings.mode != KV:
        return BasicPolicy(client, settings.mode)
    if view is None:
        view = CacheView(clock, block_tokens=block_tokens)
        await view.subscribe(events, component + KV_EVENTS_SUFFIX)
    placement = make_solver(settings, view, client.rng)
    policy = make_kv_policy(
        client,
        placement,
        clock,
        block_tokens=block_tokens,
        name=settings.policy,
        read_prompt=read_prompt,
    )
    policy.on_close = view.close
    if view.is_remote:
        policy.prefetch = view.fetch_remote_match
    return policy


def connect_replicas(
    policy: Policy, clock: Clock, publisher: str, *, publish: bool
) -> tuple[ReplicaSync, PeerRequests] | None:
    """Apply the requests of other routers to a policy of mode `kv`; return None for other modes.

    The caller starts and closes the returned ReplicaSync. `publisher` is this process's instance
    id. With `publish`, the policy also publishes the requests that it places.
    """
    if not isinstance(policy, KvPolicy):
        return None
    peer_requests = PeerRequests(policy.solver, clock, policy.on_worker_freed)
    replica_sync = ReplicaSync(clock, publisher, peer_requests)
    if publish:
        policy.replica_sync = replica_sync
    return replica_sync, peer_requests
