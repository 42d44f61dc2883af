"""The planner: observe, predict, propose, constrain, execute."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from dynamo.core.errors import DynamoError
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.policies.policy import ScalePolicy
from dynamo.operations.planner.rails import Rails
from dynamo.operations.planner.values import (
    Demand,
    KindState,
    Observation,
    Promise,
    Proposal,
    Sample,
    ScaleDecision,
    Scene,
)

MAX_SAMPLES = 480
"""Decisions that policies look back at: two hours of them."""

Measure = Callable[[], Awaitable[Mapping[str, Demand]]]
"""Returns the demand of each model since the last call. Raises `DynamoError` if there are no
figures."""
Keep = Callable[[ScaleDecision], None]
"""Keeps a decision before its orders are given."""


class ScalePlanner:
    """Decides what to order. The state follows from observations and earlier decisions."""

    def __init__(
        self, policy: ScalePolicy, rails: Rails, promise: Promise, source: str = ""
    ) -> None:
        self._source = source
        self.policy = policy
        self.rails = rails
        self.promise = promise
        self._past: dict[str, deque[Sample]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))
        self._next_number = 1
        self.outcome: list[str] = []
        """The results of orders since the last decision."""

    def resume(self, decisions: Sequence[ScaleDecision]) -> None:
        """Go on after these decisions, oldest first. Orders to another source do not count."""
        self.rails.resume(each for each in decisions if each.source == self._source)
        for decision in decisions:
            self._next_number = decision.number + 1
            for model, sample in decision.proposed.items():
                self._past[model].append(sample)

    def decide(self, observation: Observation) -> ScaleDecision:
        """Return the decision for an observation."""
        outcome = [*self.outcome, *self.rails.follow(observation)]
        self.outcome.clear()
        wanted: dict[str, int] = {}
        why, bound, notes = dict[str, str](), dict[str, str](), list[str]()
        proposed: dict[str, Sample] = {}
        for model, kinds in _kinds_by_model(observation.kinds).items():
            demand = observation.demands.get(model)
            fault = observation.stale or (
                "there are no figures" if demand is None else demand.fault
            )
            if demand is None or fault:
                bound |= dict.fromkeys(kinds, f"{fault}: the size is held")
                continue
            proposal = self._propose(observation.now_s, model, kinds, demand)
            sample = Sample(observation.now_s, proposal.facts, proposal.wanted)
            proposed[model] = sample
            self._past[model].append(sample)
            wanted |= proposal.wanted
            why |= dict.fromkeys(kinds, proposal.why)
            notes += proposal.notes
        orders, bound_by = self.rails.constrain(observation, wanted, why)
        number, self._next_number = self._next_number, self._next_number + 1
        return ScaleDecision(
            number,
            observation.now_s,
            observation.kinds,
            proposed,
            why,
            bound | bound_by,
            notes,
            orders,
            outcome,
            self._source,
        )

    def _propose(
        self, now: float, model: str, kinds: Mapping[str, KindState], demand: Demand
    ) -> Proposal:
        past, budget = tuple(self._past[model]), self.rails.settings.budget
        return self.policy.propose(Scene(now, kinds, demand, self.promise, past, budget))


async def plan_once(
    planner: ScalePlanner, connector: Connector, measure: Measure, keep: Keep, now: float
) -> ScaleDecision:
    """Make one decision and give its orders. `keep` gets the decision before, so that a planner
    that dies in between knows its orders. Failures of the deployment become part of the next
    decision."""
    kinds: Mapping[str, KindState] = {}
    demands: Mapping[str, Demand] = {}
    stale = ""
    try:
        kinds = await connector.observe()
        demands = await measure()
    except DynamoError as error:
        stale = error.message
    decision = planner.decide(Observation(now, kinds, demands, stale))
    keep(decision)
    for order in decision.orders:
        try:
            await connector.scale(order)
        except DynamoError as error:
            planner.rails.on_failed(order, error.message, now)
            planner.outcome.append(f"order {order.number} failed: {error.message}")
    return decision


def _kinds_by_model(kinds: Mapping[str, KindState]) -> Mapping[str, Mapping[str, KindState]]:
    models: dict[str, dict[str, KindState]] = defaultdict(dict)
    for name, kind in kinds.items():
        models[kind.model][name] = kind
    return models


def describe(decision: ScaleDecision, time_of: Callable[[float], str]) -> Iterable[str]:
    """Yield the sentences of a decision: a line for each kind, then notes."""
    at = f"{time_of(decision.now_s)} #{decision.number}"
    ordered = {order.kind: order for order in decision.orders}
    for kind, state in decision.kinds.items():
        why, bound = decision.why.get(kind, ""), decision.bound.get(kind, "")
        reason = " (".join(filter(None, (why, bound))) + (")" if why and bound else "")
        order = ordered.get(kind)
        if order is None:
            change = f"stays at {state.wanted}"
        else:
            change = f"{state.wanted} -> {order.count}"
            if order.takes_from:
                change += f", taken from {order.takes_from}"
        yield f"{at} {kind} {change}: {reason or 'nothing is known'}"
    yield from (f"{at} note: {note}" for note in decision.notes)
    yield from (f"{at} {text}" for text in decision.outcome)
