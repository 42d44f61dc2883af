"""Pairs in large deployments: the same decisions as with the cost of every worker."""

from __future__ import annotations

from random import Random

import pytest
from tests.unit.router.fake_cluster import ENGINE, FakeCluster, instance, place_all
from tests.unit.router.test_shortlist import submit_random

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.scheduling.router.costs.interface import TABLE_ROWS
from dynamo.scheduling.router.costs.pair import PairCost
from dynamo.scheduling.router.placement import regret, solver
from dynamo.scheduling.router.placement.shortlist import ShortlistCandidates
from dynamo.scheduling.workers.placed_request import PlacedRequest

WORKERS = 120
BOTH, PREFILL, DECODE = ["prefill", "decode"], ["prefill"], ["decode"]
FLEETS = {
    "both": ("flexible", [BOTH]),
    "all kinds": ("flexible", [BOTH, PREFILL, DECODE]),
    "predicted": ("predicted", [PREFILL, DECODE]),
    "always": ("always", [PREFILL, DECODE, DECODE]),
    "thresholds": ("thresholds", [PREFILL, PREFILL, DECODE]),
    "without prefill workers": ("predicted", [DECODE]),
    "some with both": ("predicted", [DECODE, BOTH]),
    "off": ("off", [PREFILL, DECODE, BOTH]),
}


def busy_fleet(fleet: str, seed: int) -> FakeCluster:
    """A cluster whose workers differ in role, load, speed, step size and cache."""
    mode, kinds = FLEETS[fleet]
    settings = DisaggregationSettings(mode=mode, queue_size_threshold=WORKERS)
    cluster, rng = FakeCluster(WORKERS, cost=PairCost(settings), seed=seed), Random(seed)
    roles = [kinds[number % len(kinds)] for number in range(WORKERS)]
    cluster.worker_states.update_instances(
        {
            name: instance(name, engine=ENGINE | {"roles": each})
            for name, each in zip(cluster.names, roles, strict=True)
        }
    )
    for worker in cluster.worker_states.workers:
        worker.slowdown.factor = rng.uniform(0.5, 2.0)
        worker.token_budget = rng.choice((2_048, 8_192))
        worker.max_sequences = rng.choice((2, 100))
        worker.update_transfer_rate(rng.choice((0.0, 1e9, 64e9)))
        for _ in range(rng.randrange(4)):
            placed = cluster.add_prefill(worker.name, rng.randrange(1, 6_000))
            if worker.decodes and rng.random() < 0.8:
                cluster.first_token(placed, cluster.now + rng.random())
                placed.emitted = rng.randrange(500)
        worker.refresh(cluster.now + 1.0)
        if rng.random() < 0.6:
            root = rng.choice((0, rng.randrange(12))) * 10_000
            cluster.view.caches[worker.name] = set(range(root + 1, root + rng.randrange(2, 400)))
    cluster.now += rng.uniform(1.0, 2.0)
    return cluster


def decode_worker_of(placed: PlacedRequest) -> str:
    return (placed.decode_worker or placed.worker).name


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_shortlist_has_the_pairs_of_lowest_cost(fleet: str) -> None:
    cluster, rng = busy_fleet(fleet, 1), Random(1)
    cost, states = cluster.solver.cost, cluster.worker_states
    candidates = ShortlistCandidates(states, cost, 0.05, rng)
    candidates.begin(cluster.now)
    for _ in range(30):
        request = submit_random(cluster, rng)
        short = candidates.matrix_for(request)
        everyone = cost.build_matrix(candidates.allowed_workers(request.excluded), cluster.now)
        lowest = [sorted(matrix.row(request))[:TABLE_ROWS] for matrix in (short, everyone)]
        assert lowest[0] == pytest.approx(lowest[1])
        pairs = []
        for matrix in (short, everyone):
            row = matrix.row(request)
            best = row.index(min(row))
            table = matrix.candidate_table(request, row, best)()
            pairs.append([(each.worker, each.decode_worker) for each in table])
            decode_worker = matrix.workers[matrix.decode_index(request, best)].name
            assert (table[0].decode_worker or table[0].worker) == decode_worker
            assert sum(table[0].terms.values()) == pytest.approx(row[best])
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fleet", FLEETS)
def test_decisions_are_those_of_a_solver_that_prices_every_pair(
    fleet: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties are switched off, because a solver breaks them at random."""
    monkeypatch.setattr(regret, "TIE_TOLERANCE", 0.0)
    histories = []
    for large_fleet in (WORKERS, WORKERS + 1):
        monkeypatch.setattr(solver, "LARGE_FLEET", large_fleet)
        cluster, rng = busy_fleet(fleet, seed), Random(seed)
        cluster.solver.cost.tie_tolerance = 0.0
        history = []
        for burst in (30, 1, 5, 20):
            for _ in range(burst):
                submit_random(cluster, rng)
            for result in place_all(cluster.solver, cluster.now):
                placed = result.placed
                pair = placed.worker.name, decode_worker_of(placed)
                history.append((result.request.id, pair, round(result.cost_table()[0].cost, 6)))
                if rng.random() < 0.5:
                    cluster.first_token(placed, cluster.now + 0.01)
                elif rng.random() < 0.5:
                    cluster.end(placed, cluster.now + 0.01)
            cluster.now += rng.choice((0.01, 0.2))
        histories.append(history)
    assert len(histories[0]) > 10
    assert histories[0] == histories[1]


def test_a_burst_over_an_idle_fleet_spreads_over_prefill_and_decode_workers() -> None:
    names = [f"w{number}" for number in range(400)]
    cluster = FakeCluster(1, cost=PairCost(DisaggregationSettings(mode="always")))
    cluster.worker_states.update_instances(
        {
            name: instance(name, engine=ENGINE | {"roles": PREFILL if number % 2 else DECODE})
            for number, name in enumerate(names)
        }
    )
    for number in range(100):
        cluster.submit(900, range(100 * number + 1, 100 * number + 50))
    placed = cluster.place().values()

    assert len({each.worker.name for each in placed}) == 100
    assert len({decode_worker_of(each) for each in placed}) == 100
