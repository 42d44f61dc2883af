"""Build the policy, the solver and the cost that the settings name."""

from __future__ import annotations

from random import Random
from typing import cast

from dynamo.core.errors import ConfigError
from dynamo.core.plugins import ROUTER_COSTS, ROUTER_MODES
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.runtime.calls.load_balancing import resolve_mode_alias
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.placement.solver import PlacementSolver
from dynamo.scheduling.router.policies.adaptive import AdaptivePolicy
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.scheduling.router.policies.prefill import PrefillPolicy
from dynamo.scheduling.router.policy import BasicPolicy, Policy, PolicyInputs
from dynamo.scheduling.router.queue import PendingRequest, WaitingQueue
from dynamo.scheduling.router.selectors import SelectionStrategy, adapt_selector, make_selector
from dynamo.scheduling.workers.ledger import Ledger

KV = "kv"
KV_EVENTS_SUFFIX = ".kv_events"
QUEUE_STARVATION_S = 10.0
"""Wait after which a request goes before all others, whatever the queue order."""


def make_cost(settings: RouterSettings) -> Cost:
    """Make the cost that `router.policy` names. Raises `ConfigError`."""
    name = settings.policy
    cost_class: type[Cost] = ROUTER_COSTS.load(name)
    if name in ROUTER_COSTS.builtin:
        return cost_class.from_settings(settings)
    try:
        cost = cost_class.from_settings(settings)
    except Exception as error:
        raise ConfigError(f"router policy {name!r} cannot be made: {error!r}") from error
    if not isinstance(cost, Cost):
        raise ConfigError(f"router policy {name!r} is not a Cost")
    return cost


def make_solver(
    settings: RouterSettings,
    view: CacheView,
    rng: Random,
    ledger: Ledger,
) -> PlacementSolver:
    """Make the placement solver over `view` that the settings describe. Raises `ConfigError`."""
    queue: WaitingQueue[PendingRequest] = WaitingQueue(
        settings.queue_order, settings.queue_bound, QUEUE_STARVATION_S
    )
    select = None
    if settings.selector != SelectionStrategy.HighestScore:
        select = adapt_selector(make_selector(settings.selector, settings.temperature, rng))
    return PlacementSolver(
        ledger,
        view,
        make_cost(settings),
        rng,
        select=select,
        queue=queue,
        threshold=settings.queue_threshold,
    )


async def open_policy(inputs: PolicyInputs) -> Policy:
    """Open the policy of `router.mode`. Close it to stop following the workers. Raises
    `ConfigError` for an unknown mode, cost or selector."""
    mode = inputs.settings.mode
    name = mode if mode in ROUTER_MODES else resolve_mode_alias(mode)
    policy: Policy = await ROUTER_MODES.load(name)(inputs)
    if inputs.prefill_client is None or isinstance(policy, KvPolicy):
        return policy
    return cast("Policy", PrefillPolicy(policy, inputs.prefill_client, inputs.settings))


async def open_basic_policy(inputs: PolicyInputs) -> Policy:
    """Open a load-balancing mode that knows nothing of models, such as round_robin."""
    return BasicPolicy(inputs.client, inputs.settings.mode)


async def open_adaptive_policy(inputs: PolicyInputs) -> Policy:
    """Open mode adaptive, which follows the workers' load reports."""
    algorithm = inputs.settings.load_balancing.algorithm
    return AdaptivePolicy(inputs.client, inputs.ledger, inputs.clock, algorithm)


async def open_kv_policy(inputs: PolicyInputs) -> Policy:
    """Open mode kv, which follows the workers' KV events unless a cache view is given."""
    view = inputs.view
    if view is None:
        view = CacheView(inputs.clock, block_tokens=inputs.block_tokens)
        await view.subscribe(inputs.events, inputs.component + KV_EVENTS_SUFFIX)
    return KvPolicy(inputs, make_solver(inputs.settings, view, inputs.client.rng, inputs.ledger))
