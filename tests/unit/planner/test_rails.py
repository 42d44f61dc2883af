"""Tests of the rails of the planner, one or more for each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.support.planner_cluster import Cluster, make_demand

from dynamo.core.settings.schema_planner import PlannerSettings
from dynamo.operations.planner.planner import ScalePlanner, describe
from dynamo.operations.planner.policies.policy import PolicyOptions
from dynamo.operations.planner.policies.simple import RulePolicy, StaticPolicy
from dynamo.operations.planner.rails import Rails
from dynamo.operations.planner.values import KindState, Promise, ScaleDecision

DEMAND = make_demand(10)


NO_MINIMUM = PlannerSettings(min=0)


def static(sizes: dict[str, int], settings: PlannerSettings = NO_MINIMUM) -> ScalePlanner:
    return ScalePlanner(StaticPolicy(PolicyOptions(sizes=sizes)), Rails(settings), Promise())


async def run(
    cluster: Cluster, planner: ScalePlanner, seconds: float, step_s: float = 15.0
) -> ScaleDecision:
    """Decide until `seconds` have passed. Returns the last decision."""
    end_s = cluster.now_s + seconds
    while True:
        decision = await cluster.plan(planner, DEMAND)
        if cluster.now_s >= end_s:
            return decision
        cluster.now_s += step_s


async def test_a_size_is_ordered_once_and_confirmed() -> None:
    cluster = Cluster({"worker": KindState(2)})
    planner = static({"worker": 5})
    decision = await run(cluster, planner, 300)
    assert [(order.kind, order.count) for order in cluster.orders] == [("worker", 5)]
    assert decision.kinds["worker"].ready == 5


async def test_late_figures_repeat_no_order() -> None:
    cluster = Cluster({"worker": KindState(2)}, late_s=45.0)
    await run(cluster, static({"worker": 5}), 300)
    assert len(cluster.orders) == 1


async def test_the_budget_holds_while_workers_drain() -> None:
    kinds = {"a": KindState(4), "b": KindState(0, gpus=2)}
    cluster = Cluster(kinds, drain_s=40.0)
    planner = static({"a": 0, "b": 2}, PlannerSettings(budget=4, min=0))
    await cluster.plan(planner, DEMAND)
    assert [(order.kind, order.count) for order in cluster.orders] == [("a", 0)]
    held = []
    for _ in range(20):
        cluster.now_s += 5
        held.append(cluster.gpus())
        decision = await cluster.plan(planner, DEMAND)
    assert max(held) == 4
    assert decision.kinds["b"].wanted == 2


async def test_the_budget_counts_orders_that_figures_do_not_show_yet() -> None:
    cluster = Cluster({"a": KindState(1), "b": KindState(1)}, late_s=30.0)
    planner = static({"a": 3}, PlannerSettings(budget=4))
    await cluster.plan(planner, DEMAND)
    planner.policy = StaticPolicy(PolicyOptions(sizes={"a": 3, "b": 3}))
    cluster.now_s = 15.0
    await cluster.plan(planner, DEMAND)
    assert sum(len(cluster.wanted(kind)) for kind in "ab") <= 4


async def test_a_smaller_budget_takes_workers_at_once() -> None:
    cluster = Cluster({"worker": KindState(6)})
    planner = static({"worker": 6}, PlannerSettings(budget=6))
    await cluster.plan(planner, DEMAND)
    planner.rails.settings = replace(planner.rails.settings, budget=4)
    decision = await cluster.plan(planner, None)  # even without figures
    assert [order.count for order in decision.orders] == [4]


async def test_a_kind_of_unknown_size_does_not_grow_under_a_budget() -> None:
    cluster = Cluster({"a": KindState(1, gpus=None), "b": KindState(1)})
    await run(cluster, static({"a": 3, "b": 3}, PlannerSettings(budget=16)), 60)
    assert len(cluster.wanted("a")) == 1
    assert len(cluster.wanted("b")) == 3
    await run(cluster, static({"a": 3}), 60)
    assert len(cluster.wanted("a")) == 3


@pytest.mark.parametrize(("wanted", "size"), [(0, 2), (9, 5)])
async def test_limits(wanted: int, size: int) -> None:
    cluster = Cluster({"worker": KindState(3)})
    decision = await cluster.plan(static({"worker": wanted}, PlannerSettings(min=2, max=5)), DEMAND)
    assert [order.count for order in decision.orders] == [size]
    assert "planner.m" in decision.bound["worker"]


async def test_a_kind_grows_by_so_many_at_once() -> None:
    cluster = Cluster({"worker": KindState(2)})
    planner = static({"worker": 40})
    decision = await cluster.plan(planner, DEMAND)
    assert decision.orders[0].count == 10
    await run(cluster, planner, 120)
    assert len(cluster.wanted("worker")) == 40


async def test_a_kind_does_not_shrink_right_after_it_grew() -> None:
    cluster = Cluster({"worker": KindState(2)})
    planner = static({"worker": 4}, PlannerSettings(cooldown=60))
    await cluster.plan(planner, DEMAND)
    planner.policy = StaticPolicy(PolicyOptions(sizes={"worker": 1}))
    await run(cluster, planner, 45)
    assert len(cluster.wanted("worker")) == 4
    await run(cluster, planner, 30)
    assert len(cluster.wanted("worker")) == 1


async def test_a_size_turns_four_times_in_ten_minutes() -> None:
    cluster = Cluster({"worker": KindState(2)})
    planner = static({"worker": 2}, PlannerSettings(cooldown=0))
    for step in range(160):
        planner.policy = StaticPolicy(PolicyOptions(sizes={"worker": 2 + 3 * (step % 2)}))
        await cluster.plan(planner, DEMAND)
        cluster.now_s += 15
    times = [order.number for order in cluster.orders]
    assert len(times) <= 2 + 4 * 4  # forty minutes


@pytest.mark.parametrize("fault", ["missing", "nan", "no time"])
async def test_missing_figures_hold_the_size(fault: str) -> None:
    cluster = Cluster({"worker": KindState(3)})
    planner = ScalePlanner(RulePolicy(PolicyOptions()), Rails(PlannerSettings()), Promise())
    demands = {
        "missing": None,
        "nan": make_demand(10, queued_tokens=float("nan")),
        "no time": replace(DEMAND, seconds=0.0),
    }
    decision = await cluster.plan(planner, demands[fault])
    assert not decision.orders
    assert "held" in decision.bound["worker"]


async def test_zero_traffic_is_a_figure() -> None:
    cluster = Cluster({"worker": KindState(3)})
    planner = ScalePlanner(RulePolicy(PolicyOptions()), Rails(PlannerSettings(min=0)), Promise())
    for _ in range(3):
        await cluster.plan(planner, make_demand(0))
        cluster.now_s += 301
    assert cluster.wanted("worker") == []
    decision = await cluster.plan(planner, make_demand(0, waiting=1))  # nobody else can tell
    assert [order.count for order in decision.orders] == [1]


async def test_a_size_that_somebody_set_holds_for_a_while() -> None:
    cluster = Cluster({"worker": KindState(2)})
    planner = static({"worker": 2}, PlannerSettings(hold_s=900))
    await run(cluster, planner, 30)
    cluster.set_size("worker", 5)
    decision = await run(cluster, planner, 800)
    assert len(cluster.wanted("worker")) == 5
    assert "somebody set 5" in decision.bound["worker"]
    await run(cluster, planner, 200)
    assert len(cluster.wanted("worker")) == 2


async def test_workers_that_do_not_start_in_time_are_withdrawn() -> None:
    cluster = Cluster({"a": KindState(1), "b": KindState(1)}, start_s=1e9)
    planner = static({"a": 3, "b": 1}, PlannerSettings(start_timeout=120))
    await run(cluster, planner, 150)
    assert len(cluster.wanted("a")) == 1
    cluster.start_s = 10.0
    planner.policy = StaticPolicy(PolicyOptions(sizes={"a": 3, "b": 2}))
    await run(cluster, planner, 30)
    assert len(cluster.wanted("a")) == 1  # its start is not tried again soon
    assert len(cluster.wanted("b")) == 2
    await run(cluster, planner, 600)
    assert len(cluster.wanted("a")) == 3


async def test_a_start_that_fails_is_nobodys_hand() -> None:
    cluster = Cluster({"worker": KindState(1)}, start_s=60)
    planner = static({"worker": 3})
    await run(cluster, planner, 30)
    cluster.workers["worker"].pop()
    decision = await cluster.plan(planner, DEMAND)
    assert "did not start" in decision.outcome[0]
    assert "somebody" not in str(decision.bound)


async def test_a_failing_kind_does_not_grow() -> None:
    cluster = Cluster({"worker": KindState(1, failing="no such model")})
    decision = await cluster.plan(static({"worker": 3}), DEMAND)
    assert not decision.orders
    assert "no such model" in decision.bound["worker"]


async def test_an_order_that_fails_is_named_and_given_again() -> None:
    cluster = Cluster({"a": KindState(1), "b": KindState(1)}, fail_next=1)
    planner = static({"a": 2, "b": 2})
    await cluster.plan(planner, DEMAND)
    assert [order.kind for order in cluster.orders] == ["b"]
    cluster.now_s = 15
    decision = await cluster.plan(planner, DEMAND)
    assert "does not answer" in decision.outcome[0]
    await run(cluster, planner, 90)
    assert sorted(order.kind for order in cluster.orders) == ["a", "b"]


async def test_a_deployment_that_cannot_be_seen_gets_no_orders() -> None:
    cluster = Cluster({"worker": KindState(1)}, unreachable=True)
    decision = await cluster.plan(static({"worker": 3}), DEMAND)
    assert not decision.orders


async def test_workers_of_a_pool_take_the_role() -> None:
    kinds = {
        "prefill": KindState(2, role="prefill", pool="m"),
        "decode": KindState(6, role="decode", pool="m"),
    }
    cluster = Cluster(kinds)
    planner = static({"prefill": 5, "decode": 3}, PlannerSettings(budget=8))
    decision = await cluster.plan(planner, DEMAND)
    assert [(order.kind, order.count, order.takes_from) for order in decision.orders] == [
        ("prefill", 5, "decode")
    ]
    assert cluster.gpus() == 8
    cluster.now_s = 15
    assert not (await cluster.plan(planner, DEMAND)).orders


async def test_a_restarted_planner_goes_on() -> None:
    cluster = Cluster({"worker": KindState(2)}, late_s=30.0)
    planner = static({"worker": 4}, PlannerSettings(hold_s=900))
    decisions = [await cluster.plan(planner, DEMAND)]
    planner = static({"worker": 4}, PlannerSettings(hold_s=900))
    planner.resume(decisions)
    cluster.now_s = 15
    assert not (await cluster.plan(planner, DEMAND)).orders
    await run(cluster, planner, 90)
    cluster.set_size("worker", 3)
    decision = await run(cluster, planner, 60)
    assert "somebody set 3" in decision.bound["worker"]


async def test_orders_to_a_deployment_that_was_started_again_do_not_count() -> None:
    cluster = Cluster({"worker": KindState(5)})
    decisions = [await cluster.plan(static({"worker": 5}), DEMAND)]
    again = Cluster({"worker": KindState(1)}, now_s=60.0)
    policy = StaticPolicy(PolicyOptions(sizes={"worker": 5}))
    planner = ScalePlanner(policy, Rails(PlannerSettings()), Promise(), "another supervisor")
    planner.resume(decisions)
    assert [order.count for order in (await again.plan(planner, DEMAND)).orders] == [5]


async def test_a_decision_reads_as_sentences() -> None:
    cluster = Cluster({"worker": KindState(2)})
    decision = await cluster.plan(static({"worker": 9}, PlannerSettings(max=4)), DEMAND)
    (line,) = describe(decision, lambda seconds: f"{seconds:.0f}s")
    assert line == "0s #1 worker 2 -> 4: the sizes are fixed (planner.max is 4)"
