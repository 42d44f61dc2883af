"""What each cost makes of the workers."""

from __future__ import annotations

import pytest
from tests.unit.router.stage import BLOCK, Stage

from dynamo.core.settings.schema_router import (
    ROUTER_POLICIES,
    RouterSettings,
    RoutingStrategySettings,
)
from dynamo.core.values import Load
from dynamo.scheduling.router.costs.affinity import AffinityCost
from dynamo.scheduling.router.costs.block_cost import BlockCost
from dynamo.scheduling.router.costs.composite import CompositeCost
from dynamo.scheduling.router.costs.interface import Cost
from dynamo.scheduling.router.costs.predicted import PredictedCost, TtftCost
from dynamo.scheduling.router.factory import COSTS, make_cost
from dynamo.scheduling.router.placement.regret import pick_lowest
from dynamo.scheduling.router.prompt import common_prefix_blocks

STEP, PROMPT = 8_192, 4_096
HASHES = list(range(1, PROMPT // BLOCK + 1))


def seed_example(stage: Stage) -> str:
    """The picture of seed 001: matches of 5, 50 and 75 %, loads of 30, 50 and 80 %. Load: the share
    of a step's tokens, and of the memory, that is taken."""
    for name, match, load in (("a", 0.05, 0.3), ("b", 0.5, 0.5), ("c", 0.75, 0.8)):
        stage.view.caches[name] = set(HASHES[: int(match * len(HASHES))])
        stage.busy(name, int(load * STEP))
        told = Load(active_blocks=int(load * 1000), total_blocks=1000)
        stage.fleet.on_load_report(name, told, stage.now)
    row = stage.arrival(PROMPT, HASHES)
    row.overlaps = stage.view.overlaps(HASHES)
    costs = stage.placement.cost.build_matrix(stage.fleet.workers, stage.now).row(row)
    return stage.names[costs.index(min(costs))]


@pytest.mark.parametrize("cost", [PredictedCost, BlockCost, CompositeCost, TtftCost])
def test_the_worked_example_chooses_worker_2(cost: type[Cost]) -> None:
    stage = Stage(3, cost())
    assert seed_example(stage) == "b"


@pytest.mark.parametrize("name", ROUTER_POLICIES)
def test_a_cost_is_the_sum_of_its_terms(name: str) -> None:
    stage = Stage(3, make_cost(RouterSettings(policy=name)))
    stage.view.caches["b"] = set(HASHES[:100])
    stage.goes(3000, HASHES[:180])
    first = stage.goes(5000, HASHES[:300])
    stage.busy(first, 400)
    arrival = stage.arrival(PROMPT, HASHES)
    arrival.overlaps = stage.view.overlaps(HASHES)
    cost, books = stage.placement.cost, stage.fleet.workers
    row = cost.build_matrix(books, stage.now).row(arrival)
    for book, one in zip(books, row, strict=True):
        assert one == pytest.approx(sum(cost.terms(arrival, book, stage.now).values()))
        assert one == pytest.approx(cost.cost(arrival, book, stage.now))


def test_every_policy_of_the_settings_has_a_cost() -> None:
    assert set(COSTS) == set(ROUTER_POLICIES)


def test_block_cost_counts_blocks_that_are_shared_once() -> None:
    stage = Stage(1, BlockCost())
    stage.goes(64, [1, 2, 3, 4])
    (book,) = stage.fleet.workers
    again = stage.arrival(64, [1, 2, 3, 9])
    again.overlaps = {"a": 3}
    terms = stage.placement.cost.terms(again, book, stage.now)
    assert terms == {"prefill_blocks": (64 + 16) / BLOCK, "decode_blocks": 4 + 1}


def test_block_cost_forgets_what_ended() -> None:
    stage = Stage(1, BlockCost())
    arrival = stage.submit(64, [1, 2, 3, 4])
    active = stage.place()[arrival.id]
    stage.placement.on_first_token(active, stage.now)
    stage.placement.on_ended(active, stage.now)
    other = stage.arrival(32, [7, 8])
    terms = stage.placement.cost.terms(other, stage.fleet.workers[0], stage.now)
    assert terms == {"prefill_blocks": 2, "decode_blocks": 2}


def test_weights_of_the_composite_come_from_the_settings() -> None:
    only_memory = RoutingStrategySettings(
        cache_hit_weight=0, load_weight=0, latency_weight=0, memory_weight=1
    )
    stage = Stage(2, make_cost(RouterSettings(policy="composite", routing_strategy=only_memory)))
    stage.fleet.on_load_report("a", Load(active_blocks=9, total_blocks=10), stage.now)
    assert stage.goes(64) == "b"


def test_affinity_stays_home_until_the_queue_is_long() -> None:
    stage = Stage(2, AffinityCost())
    stage.view.caches["a"] = set(HASHES[:6])
    assert stage.goes(160, HASHES[:10]) == "a"
    stage = Stage(2, AffinityCost())
    stage.view.caches["a"] = set(HASHES[:6])
    stage.busy("a", 60_000)
    assert stage.goes(160, HASHES[:10]) == "b"


def test_affinity_takes_a_shared_beginning_for_no_home() -> None:
    stage = Stage(2, AffinityCost())
    stage.view.caches["a"] = set(HASHES[:2])
    stage.busy("a", 100)
    assert stage.goes(160, HASHES[:10]) == "b"


def test_young_answers_are_spared() -> None:
    stage = Stage(2)
    young, old = stage.busy("a", 100), stage.busy("b", 100)
    for active, emitted in ((young, 1), (old, 900)):
        stage.placement.on_first_token(active, stage.now)
        active.emitted = emitted
    stage.now += 10
    assert stage.goes(2_000) == "b"


def test_common_blocks() -> None:
    assert common_prefix_blocks([1, 2, 3], [1, 2, 9, 4]) == 2
    assert common_prefix_blocks([], [1]) == 0
    assert common_prefix_blocks([1, 2], [1, 2]) == 2


def test_block_cost_takes_the_lower_however_near() -> None:
    """By predicted time two workers that are nearly equal are taken by chance."""
    stage = Stage(2, BlockCost(), seed=3)
    stage.busy("a", 100_016)
    stage.busy("b", 100_000)
    row = [stage.placement.cost.cost(stage.arrival(160), stage.fleet[name], 0.0) for name in "ab"]
    assert row[0] - row[1] == 1.0
    assert {pick_lowest(row, stage.rng, stage.placement.cost.tie_tolerance) for _ in range(20)} == {
        1
    }
    assert {pick_lowest(row, stage.rng) for _ in range(20)} == {0, 1}
