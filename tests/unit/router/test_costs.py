"""The costs of workers that differ in cache, load and memory."""

from __future__ import annotations

import pytest
from tests.unit.router.fake_cluster import BLOCK, FakeCluster

from dynamo.core.plugins import ROUTER_COSTS
from dynamo.core.settings.schema_router import (
    RouterSettings,
    RoutingStrategySettings,
)
from dynamo.core.values import Load
from dynamo.scheduling.router.costs.alternatives import AffinityCost, BlockCost, CompositeCost
from dynamo.scheduling.router.costs.interface import Cost, lowest_indices
from dynamo.scheduling.router.costs.predicted import PredictedCost, TtftCost
from dynamo.scheduling.router.factory import make_cost
from dynamo.scheduling.workers.prompt import common_prefix_blocks

STEP, PROMPT = 8_192, 4_096
HASHES = list(range(1, PROMPT // BLOCK + 1))


def documented_example(cluster: FakeCluster) -> str:
    """Return the cheapest worker of an example in Dynamo's documents. Overlaps are 5, 50 and 75 %,
    loads are 30, 50 and 80 % of a step's tokens and of the memory."""
    for name, match, load in (("a", 0.05, 0.3), ("b", 0.5, 0.5), ("c", 0.75, 0.8)):
        cluster.view.caches[name] = set(HASHES[: int(match * len(HASHES))])
        cluster.add_prefill(name, int(load * STEP))
        load_report = Load(active_blocks=int(load * 1000), total_blocks=1000)
        cluster.worker_states.on_load_report(name, load_report, cluster.now)
    row = cluster.make_request(PROMPT, HASHES)
    row.overlaps = cluster.view.find_overlaps(HASHES)
    costs = cluster.solver.cost.build_matrix(cluster.worker_states.workers, cluster.now).row(row)
    return cluster.names[costs.index(min(costs))]


@pytest.mark.parametrize("cost", [PredictedCost, BlockCost, CompositeCost, TtftCost])
def test_the_worked_example_chooses_worker_2(cost: type[Cost]) -> None:
    cluster = FakeCluster(3, cost())
    assert documented_example(cluster) == "b"


@pytest.mark.parametrize("name", ROUTER_COSTS.builtin)
def test_a_cost_is_the_sum_of_its_terms(name: str) -> None:
    cluster = FakeCluster(3, make_cost(RouterSettings(policy=name)))
    cluster.view.caches["b"] = set(HASHES[:100])
    cluster.route(3000, HASHES[:180])
    first = cluster.route(5000, HASHES[:300])
    cluster.add_prefill(first, 400)
    request = cluster.make_request(PROMPT, HASHES)
    request.overlaps = cluster.view.find_overlaps(HASHES)
    cost, workers = cluster.solver.cost, cluster.worker_states.workers
    row = cost.build_matrix(workers, cluster.now).row(request)
    for worker, cost_at_worker in zip(workers, row, strict=True):
        assert cost_at_worker == pytest.approx(
            sum(cost.terms(request, worker, cluster.now).values())
        )
        assert cost_at_worker == pytest.approx(cost.cost(request, worker, cluster.now))


def test_block_cost_counts_shared_blocks_once() -> None:
    cluster = FakeCluster(1, BlockCost())
    cluster.route(64, [1, 2, 3, 4])
    (worker,) = cluster.worker_states.workers
    again = cluster.make_request(64, [1, 2, 3, 9])
    again.overlaps = {"a": 3}
    terms = cluster.solver.cost.terms(again, worker, cluster.now)
    assert terms == {"prefill_blocks": (64 + 16) / BLOCK, "decode_blocks": 4 + 1}


def test_block_cost_drops_the_blocks_of_ended_requests() -> None:
    cluster = FakeCluster(1, BlockCost())
    request = cluster.submit(64, [1, 2, 3, 4])
    active = cluster.place()[request.id]
    cluster.first_token(active)
    cluster.end(active)
    other = cluster.make_request(32, [7, 8])
    terms = cluster.solver.cost.terms(other, cluster.worker_states.workers[0], cluster.now)
    assert terms == {"prefill_blocks": 2, "decode_blocks": 2}


def test_composite_weights_come_from_the_settings() -> None:
    only_memory = RoutingStrategySettings(
        cache_hit_weight=0, load_weight=0, latency_weight=0, memory_weight=1
    )
    cluster = FakeCluster(
        2, make_cost(RouterSettings(policy="composite", routing_strategy=only_memory))
    )
    cluster.worker_states.on_load_report("a", Load(active_blocks=9, total_blocks=10), cluster.now)
    assert cluster.route(64) == "b"


def test_affinity_prefers_the_cached_prefix_until_the_queue_is_long() -> None:
    cluster = FakeCluster(2, AffinityCost())
    cluster.view.caches["a"] = set(HASHES[:6])
    assert cluster.route(160, HASHES[:10]) == "a"
    cluster = FakeCluster(2, AffinityCost())
    cluster.view.caches["a"] = set(HASHES[:6])
    cluster.add_prefill("a", 60_000)
    assert cluster.route(160, HASHES[:10]) == "b"


def test_affinity_ignores_overlaps_of_less_than_half() -> None:
    cluster = FakeCluster(2, AffinityCost())
    cluster.view.caches["a"] = set(HASHES[:2])
    cluster.add_prefill("a", 100)
    assert cluster.route(160, HASHES[:10]) == "b"


def test_a_worker_with_young_answers_costs_more() -> None:
    cluster = FakeCluster(2)
    young, old = cluster.add_prefill("a", 100), cluster.add_prefill("b", 100)
    for active, emitted in ((young, 1), (old, 900)):
        cluster.first_token(active)
        active.emitted = emitted
    cluster.now += 10
    assert cluster.route(2_000) == "b"


def test_common_prefix_blocks() -> None:
    assert common_prefix_blocks([1, 2, 3], [1, 2, 9, 4]) == 2
    assert common_prefix_blocks([], [1]) == 0
    assert common_prefix_blocks([1, 2], [1, 2]) == 2


def test_block_cost_has_no_tie_tolerance() -> None:
    """With the default tolerance the two workers are tied."""
    cluster = FakeCluster(2, BlockCost(), seed=3)
    cluster.add_prefill("a", 100_016)
    cluster.add_prefill("b", 100_000)
    row = [
        cluster.solver.cost.cost(cluster.make_request(160), cluster.worker_states[name], 0.0)
        for name in "ab"
    ]
    assert row[0] - row[1] == 1.0
    assert lowest_indices(row, cluster.solver.cost.tie_tolerance) == [1]
    assert lowest_indices(row) == [0, 1]
