"""The connector `simulated`: the workers of a replay, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.core.timing.learner import SKIPPED_STEPS, WINDOW, TimingLearner
from dynamo.core.timing.model import Counts, StepTiming, Timing
from dynamo.core.values import ROLES_BY_NAME
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.values import Demand, EngineLimits, KindState, Order
from dynamo.operations.replay.fleet import FleetDemand, ReplayFleet
from dynamo.operations.replay.workers import ReplayWorkers

ROLE_NAMES = {roles: name for name, roles in ROLES_BY_NAME.items()}


class SimulatedConnector(Connector):
    """Changes the fleet of a replay. A worker that drains and is wanted again stays."""

    def __init__(
        self, fleet: ReplayFleet, workers: ReplayWorkers, start_s: float, gpus: int = 1
    ) -> None:
        """`start_s`: what a start usually takes. `gpus`: those of a worker."""
        self._fleet = fleet
        self._start_s = start_s
        self._gpus = gpus
        self._numbers: set[int] = set()
        self._roles = {each.kind: ROLE_NAMES[each.engine.roles] for each in workers.groups}
        self._pool = "replay" if workers.transfer is not None else ""

    async def observe(self) -> Mapping[str, KindState]:
        return {
            kind: KindState(
                counts.starting + counts.ready,
                counts.ready,
                counts.starting,
                counts.draining,
                start_s=self._start_s,
                gpus=self._gpus,
                role=self._roles[kind],  # type: ignore[arg-type]
                pool=self._pool if self._roles[kind] != "both" else "",
            )
            for kind, counts in self._fleet.observe().items()
        }

    async def scale(self, order: Order) -> None:
        if order.number in self._numbers:
            return
        fleet, kind = self._fleet, order.kind
        size = len(fleet.of_kind(kind, "starting")) + len(fleet.of_kind(kind))
        if order.takes_from:
            for worker in fleet.of_kind(order.takes_from)[: max(0, order.count - size)]:
                fleet.set_role(worker, self._roles[kind])
        else:
            staying = fleet.of_kind(kind, "draining")[::-1]
            for worker in staying[: max(0, order.count - size)]:
                fleet.revive(worker)
                size += 1
            for _ in range(order.count - size):
                fleet.start(kind)
            leaving = [*fleet.of_kind(kind, "starting")[::-1], *fleet.of_kind(kind)]
            for worker in leaving[: max(0, size - order.count)]:
                fleet.drain(worker)
        self._numbers.add(order.number)


def linear_timing(timing: StepTiming, capacity_tokens: int) -> Timing | None:
    """Return the linear timing that a worker with such steps learns."""
    if isinstance(timing, Timing):
        return timing
    learner = TimingLearner()
    for number in range(2 * WINDOW + SKIPPED_STEPS):
        decoding = 1 + number % 13 * 16
        prompt = number % 2 * (1 + number % 7) * 500
        context = decoding * 150 * (1 + number % 5)
        attention = prompt * prompt / 2
        counts = Counts(prompt, decoding + (prompt > 0), decoding, context, attention)
        learner.observe(counts, timing.step_ms(counts, capacity_tokens) / 1e3)
    return learner.timing


class SimulatedDemand:
    """Measures what arrives in a replay."""

    def __init__(self, fleet: ReplayFleet, workers: ReplayWorkers) -> None:
        self._fleet = fleet
        group = workers.groups[0]
        engine = group.engine
        self._timing = linear_timing(group.timing, engine.num_blocks * engine.block_tokens)
        self._limits = EngineLimits(
            engine.max_num_seqs,
            engine.num_blocks * engine.block_tokens,
            engine.max_num_batched_tokens,
        )
        self._before = FleetDemand(0, 0, 0, 0, 0, 0, 0, 0)
        self._before_s = 0.0

    async def measure(self) -> Mapping[str, Demand]:
        """Return the demand since the last call."""
        now, total, before = self._fleet.clock.now(), self._fleet.demand(), self._before
        prompts = total.prompt_tokens - before.prompt_tokens
        cached = total.cached_tokens - before.cached_tokens
        demand = Demand(
            now - self._before_s,
            total.requests - before.requests,
            max(0, prompts - cached),
            total.ended - before.ended,
            total.output_tokens - before.output_tokens,
            total.queued_tokens,
            total.running,
            total.waiting,
            self._timing,
            self._limits,
        )
        self._before, self._before_s = total, now
        return {"": demand} if demand.seconds else {}
