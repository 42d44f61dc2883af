"""Shortlists of large deployments: the same decisions as with the cost of every worker."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from tests.unit.router.fake_cluster import BLOCK, FakeCluster, place_all

from dynamo.scheduling.router.costs.interface import TABLE_ROWS
from dynamo.scheduling.router.placement import regret, solver
from dynamo.scheduling.router.placement.shortlist import (
    SHORTLIST,
    ShortlistCandidates,
    find_cheapest,
)
from dynamo.scheduling.router.queue import PendingRequest

WORKERS = 200
TENANTS = 12


def busy_cluster(seed: int, workers: int = WORKERS) -> FakeCluster:
    """A cluster whose workers differ in load, speed, step size and cache."""
    cluster, rng = FakeCluster(workers, seed=seed), Random(seed)
    for worker in cluster.worker_states.workers:
        worker.slowdown.factor = rng.uniform(0.5, 2.0)
        worker.token_budget = rng.choice((2_048, 8_192))
        for _ in range(rng.randrange(4)):
            placed = cluster.add_prefill(worker.name, rng.randrange(1, 6_000))
            if rng.random() < 0.7:
                cluster.first_token(placed, cluster.now + rng.random())
                placed.emitted = rng.randrange(500)
        worker.refresh(cluster.now + 1.0)
        if rng.random() < 0.6:
            root = rng.choice((0, rng.randrange(TENANTS))) * 10_000
            cluster.view.caches[worker.name] = set(range(root + 1, root + rng.randrange(2, 400)))
    cluster.now += rng.uniform(1.0, 2.0)
    return cluster


def submit_random(cluster: FakeCluster, rng: Random) -> PendingRequest:
    tokens, root = rng.choice((40, 400, 3_000, 9_000)), rng.randrange(TENANTS) * 10_000
    shared = rng.randrange(tokens // BLOCK + 1)
    own = rng.randrange(1, 1 << 40)
    hashes = [*range(root + 1, root + 1 + shared), *range(own, own + tokens // BLOCK - shared)]
    excluded = frozenset(
        rng.sample(cluster.names, rng.choice((0, 0, 0, 1, len(cluster.names) // 2)))
    )
    return cluster.submit(tokens, hashes, excluded=excluded)


@pytest.mark.parametrize("seed", range(12))
def test_a_shortlist_has_the_workers_of_lowest_cost(seed: int) -> None:
    cluster, rng = busy_cluster(seed), Random(seed)
    cost, states = cluster.solver.cost, cluster.worker_states
    candidates = ShortlistCandidates(states, cost, 0.05, rng)
    candidates.begin(cluster.now)
    for _ in range(20):
        request = submit_random(cluster, rng)
        matrix = candidates.matrix_for(request)
        allowed = candidates.allowed_workers(request.excluded)
        row = cost.build_matrix(allowed, cluster.now).row(request)
        assert matrix.allowed == len(row)
        assert sorted(matrix.row(request)) == sorted(row)[:SHORTLIST]


@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_those_of_a_solver_that_prices_every_worker(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties are switched off, because a solver breaks them at random."""
    monkeypatch.setattr(regret, "TIE_TOLERANCE", 0.0)
    histories = []
    for large_fleet in (WORKERS, WORKERS + 1):
        monkeypatch.setattr(solver, "LARGE_FLEET", large_fleet)
        cluster, rng = busy_cluster(seed), Random(seed)
        cluster.solver.cost.tie_tolerance = 0.0
        history = []
        for burst in (40, 1, 5, 30, 1, 5):
            for _ in range(burst):
                submit_random(cluster, rng)
            results = place_all(cluster.solver, cluster.now)
            for result in results:
                best = [(row.worker, row.cost) for row in result.cost_table()][:TABLE_ROWS]
                history.append((result.request.id, result.placed.worker.name, best))
                if rng.random() < 0.5:
                    cluster.first_token(result.placed, cluster.now + 0.01)
                elif rng.random() < 0.5:
                    cluster.end(result.placed, cluster.now + 0.01)
            history.append(cluster.solver.next_run_s(cluster.now))
            cluster.now += rng.choice((0.01, 0.2))
        histories.append(history)
    assert len(histories[0]) > 20
    assert histories[0] == histories[1]


def test_ties_of_an_idle_deployment_are_broken_at_random() -> None:
    cluster = FakeCluster(WORKERS)
    for number in range(WORKERS):
        cluster.route(900, range(100 * number + 1, 100 * number + 50))
        cluster.now += 1.0
        for worker in cluster.worker_states.workers:
            for placed in list(worker.active.values()):
                cluster.end(placed)
    assert len(set(cluster.view.routes)) > WORKERS / 2


def test_a_burst_spreads_over_an_idle_deployment() -> None:
    cluster = FakeCluster(WORKERS)
    for number in range(WORKERS):
        cluster.submit(900, range(100 * number + 1, 100 * number + 50))
    assert len(cluster.place()) == WORKERS
    assert set(Counter(cluster.view.routes).values()) == {1}


def test_a_row_gains_the_worker_that_its_prefix_was_sent_to() -> None:
    """The worker is not on the shortlist of the second request before."""
    cluster = FakeCluster(WORKERS)
    cluster.add_prefill("b", 500)
    prefix = list(range(1, 501))
    first = cluster.submit(8_016, prefix, excluded=frozenset(cluster.names) - {"b"})
    second = cluster.submit(8_000, prefix)
    placed = cluster.place()
    assert {name: each.worker.name for name, each in placed.items()} == {first.id: "b"}
    assert second.overlaps == {"b": 500}
    assert second.id not in cluster.place()


def test_many_equal_costs_are_sampled() -> None:
    costs, rng = np.ones(1_000), Random(1)
    costs[7], costs[8] = 0.9999, 0.9998
    seen: Counter[int] = Counter()
    for _ in range(400):
        chosen = find_cheapest(costs, 28, 1e-3, rng).tolist()
        assert {7, 8} <= set(chosen)
        assert len(chosen) in {26, 27, 28}
        seen.update(chosen)
    assert len(seen) == 1_000
    seen.clear()
    costs[:20] = 0.5
    for _ in range(1_000):
        chosen = find_cheapest(costs, 28, 1e-3, rng).tolist()
        assert len(chosen) == 28
        assert set(range(20)) <= set(chosen)
        seen.update(chosen)
    assert len(seen) == 1_000


def test_workers_may_leave_and_join() -> None:
    cluster = FakeCluster(WORKERS)
    placed = cluster.add_prefill("b", 100)
    assert cluster.route(900)
    instances = {state.name: state.instance for state in cluster.worker_states.workers}
    for gone in ("a", "b"):
        del instances[gone]
    cluster.worker_states.update_instances(instances)
    cluster.end(placed)
    assert cluster.route(900) in instances
    cluster.worker_states.update_instances(dict(list(instances.items())[:3]))
    assert cluster.route(900) in list(instances)[:3]
