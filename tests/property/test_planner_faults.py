"""A planner whose deployment and figures fail at random keeps to its rails."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from random import Random

import msgspec
import pytest
from tests.support.planner_cluster import Cluster, make_demand

from dynamo.core.errors import PlaneUnavailable
from dynamo.core.settings.schema_planner import PlannerSettings
from dynamo.operations.planner.planner import ScalePlanner, plan_once
from dynamo.operations.planner.policies.flow import FlowPolicy
from dynamo.operations.planner.policies.policy import PolicyOptions
from dynamo.operations.planner.policies.simple import RulePolicy
from dynamo.operations.planner.rails import CONFIRM_S, Rails
from dynamo.operations.planner.values import Demand, KindState, Order, Promise, ScaleDecision

BUDGET = 12
STEPS = 240
RAILS = PlannerSettings(budget=BUDGET, max=10, start_timeout=240.0, hold_s=300.0)


class Killed(Exception):
    """The planner dies."""


class FaultyRun:
    """An hour of a planner and a cluster with random faults."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.cluster = Cluster({"a": KindState(2), "b": KindState(1, gpus=2)})
        self.decisions: list[ScaleDecision] = []
        self.ordered: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        self.planner = self.make_planner()

    def make_planner(self) -> ScalePlanner:
        policy = FlowPolicy if self.rng.random() < 0.3 else RulePolicy
        planner = ScalePlanner(policy(PolicyOptions(eta=0.7)), Rails(RAILS), Promise(1.5, 50.0))
        stored = [
            msgspec.json.decode(msgspec.json.encode(each), type=ScaleDecision)
            for each in self.decisions
        ]
        planner.resume(stored)
        return planner

    def keep(self, decision: ScaleDecision) -> None:
        self.decisions.append(decision)
        if decision.orders and self.rng.random() < 0.1:
            raise Killed

    async def measure(self) -> Mapping[str, Demand]:
        fault = self.rng.random()
        if fault < 0.05:
            raise PlaneUnavailable("figures are missing")
        phase = self.cluster.now_s / self.rng.uniform(400, 700)
        load = max(0, int(150 + 150 * math.sin(phase) + self.rng.gauss(0, 30)))
        queued = self.rng.choice([0.0, 0.0, 0.0, 1e5])
        if fault < 0.08:
            queued = float("nan")
        return {"": make_demand(load, queued_tokens=queued)}

    def break_something(self) -> None:
        cluster, rng, chance = self.cluster, self.rng, self.rng.random()
        kind = rng.choice("ab")
        workers = cluster.wanted(kind)
        starting = [each for each in workers if each.ready_s > cluster.now_s]
        cluster.start_s = rng.choice([20.0, 30.0, 300.0, 1e9])
        cluster.late_s = rng.choice([0.0, 0.0, 0.0, 15.0, 45.0])
        cluster.fail_next = int(rng.random() < 0.05)
        cluster.unreachable = rng.random() < 0.03
        if chance < 0.1 and starting:
            cluster.workers[kind].remove(starting[0])  # a start fails
        elif chance < 0.15 and workers:
            workers[0].ready_s = cluster.now_s + 30.0  # a death
        elif chance < 0.17:
            free = BUDGET - cluster.gpus() - 4  # hands leave room for orders on their way
            size = rng.randint(0, len(workers) + max(0, free // (2 if kind == "b" else 1)))
            cluster.set_size(kind, size)

    async def step(self) -> None:
        cluster = self.cluster
        before = len(cluster.orders)
        sizes = {kind: len(cluster.wanted(kind)) for kind in "ab"}
        try:
            await plan_once(self.planner, cluster, self.measure, self.keep, cluster.now_s)
        except Killed:
            self.planner = self.make_planner()
        for order in cluster.orders[before:]:
            self.check_order(order, sizes[order.kind])
        for _ in range(15):
            cluster.now_s += 1.0
            assert cluster.gpus() <= BUDGET, cluster.now_s

    def check_order(self, order: Order, size: int) -> None:
        ordered, now = self.ordered[order.kind], self.cluster.now_s
        if ordered and ordered[-1][2] == order.count:
            since = [each for each in self.decisions if each.now_s > ordered[-1][0]]
            shown = any(
                each.kinds[order.kind].wanted == order.count for each in since if each.kinds
            )
            assert shown or now > ordered[-1][0] + CONFIRM_S, "an order is repeated"
        ordered.append((now, size, order.count))
        recent = [after > before for at, before, after in ordered if at > now - 600.0]
        turns = sum(before != after for before, after in pairwise(recent))
        assert turns <= 4


async def run(seed: int) -> FaultyRun:
    faulty = FaultyRun(seed)
    for _ in range(STEPS):
        faulty.break_something()
        await faulty.step()
    return faulty


@pytest.mark.parametrize("seed", range(12))
def test_rails_hold_through_faults(seed: int) -> None:
    faulty = asyncio.run(run(seed))
    assert any(faulty.ordered.values())
