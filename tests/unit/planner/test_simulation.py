"""Tests of policies in fast replays, by the connector `simulated`."""

from __future__ import annotations

import math
from random import Random

import pytest
from msgspec.structs import replace
from tests.support.planner_cluster import TIMING

from dynamo.core.settings.schema_planner import PlannerSettings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import EngineInfo
from dynamo.operations.arrivals import Arrivals
from dynamo.operations.planner.backtest import backtest, short_record
from dynamo.operations.planner.planner import ScalePlanner
from dynamo.operations.planner.policies.flow import FlowPolicy
from dynamo.operations.planner.policies.policy import PolicyOptions, ScalePolicy
from dynamo.operations.planner.policies.simple import RulePolicy, StaticPolicy
from dynamo.operations.planner.rails import Rails
from dynamo.operations.planner.simulation import Trial, play, play_static
from dynamo.operations.planner.values import Promise
from dynamo.operations.replay.fleet import Startup
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers

PROMISE = Promise(1.5, 50.0)
ENGINE = EngineInfo("mock", 64, 4096, 32_768, 256, 8192)


@pytest.fixture(scope="module")
def trial() -> Trial:
    """A load that swings from 1 to 8 requests a second and back within 8 minutes."""
    rng = Random(3)
    times = Arrivals(1.0, 8.0, duration_s=480.0, day_s=480.0).times(rng)
    requests = [
        TraceConversation(at, [TraceRequest(row, rng.randint(1000, 6000), rng.randint(100, 500))])
        for row, at in enumerate(times)
    ]
    workers = ReplayWorkers([ReplayGroup(2, ENGINE, TIMING)], "lru", prefix_caching=False)
    settings = RouterSettings(mode="least_loaded", max_queue_wait=math.inf)
    plan = ReplayPlan("test", workers, settings, startup=Startup(10.0, 10.0))
    return Trial(
        plan, requests, PROMISE, prompt_s=lambda tokens: (TIMING.c0 + TIMING.c1 * tokens) / 1e3
    )


def planner(policy: ScalePolicy, **rails: float) -> ScalePlanner:
    return ScalePlanner(policy, Rails(PlannerSettings(**rails)), PROMISE)  # type: ignore[arg-type]


def test_a_static_policy_is_a_fixed_size(trial: Trial) -> None:
    fixed = play_static(trial, 5)
    sizes = PolicyOptions(sizes={"worker": 5})
    planned = play(replace(trial, from_s=120.0), planner(StaticPolicy(sizes)))
    assert [order.count for each in planned.decisions for order in each.orders] == [5]
    assert fixed.gpu_hours == pytest.approx(5 * trial.end_s / 3600)
    assert planned.gpu_hours == pytest.approx(5 * (trial.end_s - 120.0) / 3600)


def test_rule_follows_the_load(trial: Trial) -> None:
    result = play(trial, planner(RulePolicy(PolicyOptions())))
    assert result.broken < 0.1
    peak = max(change.ready for change in result.timeline)
    assert result.gpu_hours < 0.8 * peak * trial.end_s / 3600
    sizes = {change.ready for change in result.timeline}
    assert min(sizes) <= 2
    assert max(sizes) >= 5
    assert play(trial, planner(RulePolicy(PolicyOptions()))) == result


def test_the_budget_holds_in_a_replay(trial: Trial) -> None:
    result = play(trial, planner(RulePolicy(PolicyOptions()), budget=4))
    held = [each.starting + each.ready + each.draining for each in result.timeline]
    assert max(held) == 4


def test_flow_keeps_the_promise_by_its_backtest(trial: Trial) -> None:
    def make(eta: float, peak: int) -> ScalePlanner:
        return planner(FlowPolicy(PolicyOptions(eta=eta, peak=peak)))

    tested = backtest(trial, make)
    assert tested.broken <= tested.floor + 0.01
    best = play_static(trial, tested.peak)
    assert best.broken <= tested.floor + 0.01
    assert play_static(trial, tested.peak - 1).broken > tested.floor + 0.01
    assert tested.gpu_hours < 1.2 * best.gpu_hours


def test_a_short_record_says_how_long_one_is_needed() -> None:
    assert "needs 200 in 15" in short_record(300.0, 1000)
    assert not short_record(3600.0, 1000)
