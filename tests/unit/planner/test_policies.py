"""Tests of policies and predictors of the planner, which are functions of values."""

from __future__ import annotations

import math
from random import Random

import pytest
from msgspec.structs import replace
from tests.support.planner_cluster import LIMITS, TIMING, make_demand

from dynamo.core.plugins import PLANNER_POLICIES, PLANNER_PREDICTORS
from dynamo.core.timing.model import Timing
from dynamo.operations.planner.capacity import Lengths, PromiseCapacity
from dynamo.operations.planner.policies.flow import FlowPolicy, growth_factor
from dynamo.operations.planner.policies.policy import PolicyOptions, ScalePolicy, spread
from dynamo.operations.planner.policies.simple import LoadPolicy, ThroughputPolicy
from dynamo.operations.planner.values import (
    Demand,
    KindState,
    Promise,
    Proposal,
    Sample,
    Scene,
)

PROMISE = Promise(1.5, 50.0)
LENGTHS = Lengths(1000, 200)
SPLIT = {
    "prefill": KindState(4, 4, role="prefill", start_s=15),
    "decode": KindState(4, 4, role="decode", start_s=15),
}


def play(
    policy: ScalePolicy,
    demands: list[Demand],
    kinds: dict[str, KindState],
    budget: int | None = None,
) -> list[Proposal]:
    """Return the proposals for demands that follow each other, whose sizes are there at once."""
    past: list[Sample] = []
    proposals = []
    for number, demand in enumerate(demands):
        now = number * policy.interval_s
        scene = Scene(now, kinds, demand, PROMISE, tuple(past), budget)
        proposals.append(policy.propose(scene))
        past.append(Sample(now, proposals[-1].facts, proposals[-1].wanted))
        sizes = proposals[-1].wanted
        kinds = {
            name: replace(kind, wanted=sizes[name], ready=sizes[name])
            for name, kind in kinds.items()
        }
    return proposals


@pytest.mark.parametrize("name", PLANNER_PREDICTORS.names())
def test_predictors_forecast_a_constant_and_stay_finite(name: str) -> None:
    predict = PLANNER_PREDICTORS.load(name)
    assert predict([5.0]) == 5.0
    assert predict([5.0] * 300) == pytest.approx(5.0, rel=0.01)
    rng = Random(1)
    values = [rng.expovariate(0.2) for _ in range(300)]
    assert all(0 <= predict(values[:count]) < 1000 for count in range(1, 300, 13))


@pytest.mark.parametrize(("name", "low", "high"), [("kalman", 99, 103), ("arima", 99, 103)])
def test_predictors_with_a_trend_follow_a_ramp(name: str, low: float, high: float) -> None:
    assert low < PLANNER_PREDICTORS.load(name)([float(value) for value in range(101)]) < high


def test_adaptive_smoothing_chooses_its_constant_by_the_past() -> None:
    predict = PLANNER_PREDICTORS.load("adaptive")
    assert predict([1.0] * 50 + [9.0] * 20) > 8.5  # a level that changed
    noise = [5.0 + (-1) ** number for number in range(200)]
    assert abs(predict(noise) - 5.0) < 0.2


def test_capacity_is_that_of_the_formulas() -> None:
    capacity = PromiseCapacity(TIMING, LIMITS, PROMISE, LENGTHS)
    context = 1000 + 100
    batch = (0.95 * 50 - 12) / (0.09 * 1000 / 200 + 0.05 + 6e-5 * context)
    assert capacity.batch() == pytest.approx(batch)
    answer_ms = 12 / batch + 0.05 + 6e-5 * context
    demand = make_demand(30)
    work = (0.09 * 30_000 + 30 * 200 * answer_ms) / 1e3 / 15
    assert capacity.work(demand) == pytest.approx(work)
    assert not capacity.fault


@pytest.mark.parametrize(
    ("promise", "words"), [(Promise(1.5, 8.0), "8 ms"), (Promise(0.05, 50.0), "0.05 s")]
)
def test_a_promise_beyond_physics_is_said_and_holds_no_workers(
    promise: Promise, words: str
) -> None:
    capacity = PromiseCapacity(TIMING, LIMITS, promise, LENGTHS)
    assert words in capacity.fault
    easy = PromiseCapacity(TIMING, LIMITS, Promise(), LENGTHS)
    assert capacity.work(make_demand(30)) <= 2 * easy.work(make_demand(30))


def test_spread_keeps_the_sizes_of_kinds_and_grows_one_that_works() -> None:
    kinds = {"a": KindState(2, failing="broken"), "b": KindState(3)}
    assert spread(7, kinds) == {"a": 2, "b": 5}
    assert spread(4, kinds) == {"a": 2, "b": 2}
    assert spread(1, kinds) == {"a": 1, "b": 0}


@pytest.mark.parametrize("name", PLANNER_POLICIES.names())
@pytest.mark.parametrize("kinds", [{"worker": KindState(2, 2, start_s=30)}, SPLIT])
def test_policies_are_functions_of_the_scene(name: str, kinds: dict[str, KindState]) -> None:
    demands = [make_demand(20 + 5 * step, queued_tokens=step * 500.0) for step in range(30)]
    options = PolicyOptions(eta=0.8)
    policy = PLANNER_POLICIES.load(name)
    assert play(policy(options), demands, kinds) == play(policy(options), demands, kinds)
    unknown = play(policy(options), [Demand(15.0, 5)], kinds)
    assert set(unknown[0].wanted) == set(kinds)


def test_flow_learns_what_follows_its_forecasts() -> None:
    past = []
    for number in range(40):
        work = 2.0 * 1.1**number
        past.append(Sample(number * 15.0, {"work": work, "forecast": work}, {}))
    scene = Scene(600.0, {}, make_demand(0), PROMISE, tuple(past))
    assert growth_factor(scene, 45.0, 2.0 * 1.1**40) == pytest.approx(1.1**3)
    assert growth_factor(Scene(0.0, {}, make_demand(0), PROMISE), 45.0, 1.0) == 1.0


def test_flow_grows_at_once_and_shrinks_after_a_while() -> None:
    demands = [make_demand(80)] * 20 + [make_demand(320)] * 4 + [make_demand(80)] * 30
    sizes = [
        each.wanted["worker"]
        for each in play(
            FlowPolicy(PolicyOptions(eta=0.8)), demands, {"worker": KindState(1, 1, start_s=30)}
        )
    ]
    low, high = sizes[19], max(sizes)
    assert high > 2 * low
    peak = sizes.index(high)
    assert sizes[peak + 3] == high
    assert sizes[-1] <= low + 1


def test_flow_adds_for_queues_and_within_its_peak() -> None:
    kinds = {"worker": KindState(4, 4, start_s=30)}
    queued = make_demand(20, queued_tokens=200_000)
    capacity = PromiseCapacity(TIMING, LIMITS, PROMISE, LENGTHS)
    options = PolicyOptions(eta=0.8, peak=1)
    (plain,) = play(FlowPolicy(options), [make_demand(20)], kinds)
    (more,) = play(FlowPolicy(options), [queued], kinds)
    extra = capacity.prompt_work_ms(200_000) / 1e3 / 30
    assert more.facts["size both"] == math.ceil(plain.facts["work"] / 0.8 + extra)
    assert "wait" in more.why


def test_flow_without_a_backtest_is_rule_and_says_so() -> None:
    kinds = {"worker": KindState(2, 2)}
    options = PolicyOptions(eta_missing="the record has 4 minutes, a backtest needs 30")
    (proposal,) = play(FlowPolicy(options), [make_demand(20)], kinds)
    assert proposal.notes == [
        "policy flow acts as rule: the record has 4 minutes, a backtest needs 30"
    ]


def test_flow_divides_a_budget_by_bare_work_first() -> None:
    long = make_demand(0)
    long = Demand(
        15.0, 195, prompt_tokens=195 * 6800.0, ended=195, output_tokens=195 * 136.0,
        timing=TIMING, limits=LIMITS,
    )  # fmt: skip
    proposals = play(FlowPolicy(PolicyOptions(eta=0.8)), [long] * 10, SPLIT, budget=16)
    sizes = proposals[-1].wanted
    assert sizes["prefill"] + sizes["decode"] <= 16
    facts = proposals[-1].facts
    assert sizes["prefill"] >= facts["work prefill"]
    assert sizes["decode"] >= facts["work decode"]


def test_flow_turns_no_role_by_chance_while_the_budget_holds_the_bare_work() -> None:
    rng = Random(3)
    demands = [
        Demand(
            15.0, 750, prompt_tokens=rng.uniform(0.95, 1.05) * 1_130_000, ended=750,
            output_tokens=rng.uniform(0.95, 1.05) * 480_000, timing=TIMING, limits=LIMITS,
        )
        for _ in range(60)
    ]  # fmt: skip
    proposals = play(FlowPolicy(PolicyOptions()), demands, SPLIT, budget=16)
    assert sum(proposals[-1].wanted.values()) == 16
    assert len({tuple(each.wanted.values()) for each in proposals[5:]}) == 1


@pytest.mark.parametrize(("pool", "sizes"), [("p", (10, 3)), ("", (11, 3))])
def test_a_role_lends_ready_workers_to_one_that_lacks_some_now(
    pool: str, sizes: tuple[int, int]
) -> None:
    demand = Demand(
        15.0, 195, prompt_tokens=195 * 6800.0, ended=195, output_tokens=195 * 280.0,
        timing=TIMING, limits=LIMITS,
    )  # fmt: skip
    kinds = {
        "prefill": KindState(11, 11, role="prefill", start_s=60, pool=pool),
        "decode": KindState(2, 2, role="decode", start_s=60, pool=pool),
    }
    policy, past = FlowPolicy(PolicyOptions()), list[Sample]()
    first = policy.propose(Scene(0.0, kinds, demand, PROMISE, (), 16))
    assert tuple(first.wanted.values()) == sizes
    past.append(Sample(0.0, first.facts, first.wanted))

    lent = {
        "prefill": KindState(10, 10, role="prefill", start_s=60, pool=pool),
        "decode": KindState(3, 3, role="decode", start_s=60, pool=pool),
    }
    later = policy.propose(Scene(15.0, lent, demand, PROMISE, tuple(past), 16))
    assert later.wanted["prefill"] == sizes[0]


@pytest.mark.parametrize("pool", ["p", ""])
def test_workers_that_can_turn_are_held_for_some_starts(pool: str) -> None:
    """A mix of requests that comes back needs them before new ones have started."""
    many, few = make_demand(700), make_demand(200)
    kinds = {name: replace(kind, pool=pool) for name, kind in SPLIT.items()}
    proposals = play(FlowPolicy(PolicyOptions()), [*[many] * 35, *[few] * 60], kinds)
    totals = [sum(proposal.wanted.values()) for proposal in proposals]
    assert (totals[60] == totals[34]) == bool(pool)  # 30 starts of 15 s are 30 decisions
    assert totals[-1] < totals[34]
    assert any("that could turn are held" in each.why for each in proposals) == bool(pool)


def test_roles_do_not_turn_with_chance() -> None:
    """Each turn by chance is one less that the rails allow when the load changes."""
    demands = [make_demand(335 + number // 8 % 2 * 40) for number in range(80)]
    proposals = play(FlowPolicy(PolicyOptions()), demands, SPLIT)[20:]
    wanted = [proposal.facts["wanted prefill"] for proposal in proposals]
    assert math.ceil(min(wanted)) < math.ceil(max(wanted))
    assert len({proposal.wanted["prefill"] for proposal in proposals}) == 1

    fewer = play(FlowPolicy(PolicyOptions()), [*demands, *[make_demand(100)] * 20], SPLIT)
    assert fewer[-1].wanted["prefill"] < proposals[0].wanted["prefill"] - 1


def test_throughput_adds_eight_at_most() -> None:
    kinds = {"worker": KindState(1, 1)}
    (proposal,) = play(ThroughputPolicy(PolicyOptions()), [make_demand(10_000)], kinds)
    assert proposal.wanted == {"worker": 9}


@pytest.mark.parametrize(
    ("demand", "change"),
    [
        ({"queued_tokens": 1e6}, 1),
        ({"running": 500}, 1),
        ({}, -1),
        ({"running": 200}, 0),
    ],
)
def test_load_changes_one_worker_at_a_time(demand: dict[str, float], change: int) -> None:
    kinds = {"worker": KindState(4, 4)}
    (proposal,) = play(LoadPolicy(PolicyOptions()), [make_demand(5, **demand)], kinds)
    assert proposal.wanted["worker"] == 4 + change
    moving = {"worker": KindState(4, 3, 1)}
    (proposal,) = play(LoadPolicy(PolicyOptions()), [make_demand(5, **demand)], moving)
    assert proposal.wanted["worker"] == 4


def test_an_engine_without_costs_of_tokens_has_a_capacity() -> None:
    capacity = PromiseCapacity(Timing(0.0, 0.0), LIMITS, PROMISE, LENGTHS)
    assert capacity.work(make_demand(30)) == 0.0
