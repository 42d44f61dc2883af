"""Prompts whose blocks lie in memory tiers below the workers' devices."""

from __future__ import annotations

import pytest
from tests.unit.router.fake_cluster import BLOCK, FakeCluster
from tests.unit.router.test_pair_cost import make_cluster as make_pairs

from dynamo.core.plugins import ROUTER_COSTS
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import Load, Tier, TierLoad
from dynamo.scheduling.router.costs.predicted import PredictedCost
from dynamo.scheduling.router.factory import make_cost
from dynamo.scheduling.router.placement.solver import LARGE_FLEET, PlacementResult
from dynamo.scheduling.router.queue import PendingRequest

TOKENS = 4_096
HASHES = list(range(1, TOKENS // BLOCK + 1))
QUICK_S, SLOW_S = 1e-5, 1.0
"""Seconds a block; computing one takes about a quarter of a millisecond."""


def report(cluster: FakeCluster, worker: str, **block_s: float) -> None:
    tiers: list[Tier] = ["host", "disk", "shared"]
    loads = [TierLoad(tier, block_s[tier]) for tier in tiers if tier in block_s]
    cluster.worker_states.on_load_report(worker, Load(tiers=tuple(loads)), cluster.now)


def place(cluster: FakeCluster) -> PlacementResult:
    cluster.submit(TOKENS, HASHES)
    (result,) = cluster.solver.place(cluster.now)
    return result


def blocks_by_worker(request: PendingRequest) -> dict[str, dict[str, int]]:
    return {worker: load.by_tier() for worker, load in request.loads.items()}


@pytest.mark.parametrize("cost", ROUTER_COSTS.builtin)
def test_blocks_in_host_memory_attract_a_prompt(cost: str) -> None:
    cluster = FakeCluster(4, make_cost(RouterSettings(policy=cost)))
    report(cluster, "c", host=QUICK_S)
    cluster.view.caches["c"] = set(HASHES[:8])
    cluster.view.lower.store("c", "host", HASHES[8:200])
    result = place(cluster)
    assert result.placed.worker.name == "c"
    assert result.placed.new_tokens == TOKENS - 200 * BLOCK
    (row,) = [row for row in result.cost_table() if row.worker == "c"]
    assert (row.overlap_blocks, row.tier_blocks) == (200, {"host": 192})
    assert row.cost == pytest.approx(sum(row.terms.values()))


def test_a_tier_that_is_slower_than_computing_is_not_used() -> None:
    cluster = FakeCluster(2)
    cluster.view.lower.store("b", "disk", HASHES)
    report(cluster, "b", disk=SLOW_S)
    request = cluster.submit(TOKENS, HASHES)
    assert (request.loads, request.overlaps) == ({}, {})


def test_without_a_report_nothing_is_loaded() -> None:
    cluster = FakeCluster(2)
    cluster.view.lower.store("b", "host", HASHES)
    assert cluster.submit(TOKENS, HASHES).loads == {}
    report(cluster, "b", host=QUICK_S)
    assert blocks_by_worker(cluster.submit(TOKENS, HASHES)) == {"b": {"host": len(HASHES)}}
    report(cluster, "b")
    assert cluster.submit(TOKENS, HASHES).loads == {}, "the tier fails"


def test_loading_ends_before_a_slow_tier() -> None:
    cluster = FakeCluster(1)
    report(cluster, "a", host=QUICK_S, disk=SLOW_S, shared=2 * QUICK_S)
    for tier, part in (("host", HASHES[:9]), ("disk", HASHES[9:20]), ("shared", HASHES[20:])):
        cluster.view.lower.store("a", tier, part)  # type: ignore[arg-type]
    assert blocks_by_worker(cluster.submit(TOKENS, HASHES)) == {"a": {"host": 9}}
    report(cluster, "a", host=QUICK_S, disk=QUICK_S, shared=2 * QUICK_S)
    loads = blocks_by_worker(cluster.submit(TOKENS, HASHES))
    assert loads == {"a": {"host": 9, "disk": 11, "shared": len(HASHES) - 20}}


def test_shared_blocks_count_at_every_worker_that_has_the_store() -> None:
    cluster = FakeCluster(4)
    for name in "abc":
        report(cluster, name, shared=QUICK_S)
    cluster.view.lower.store("gone", "shared", HASHES[:100])
    cluster.view.caches["b"] = set(HASHES[:40])
    request = cluster.submit(TOKENS, HASHES)
    expected = {"a": {"shared": 100}, "b": {"shared": 60}, "c": {"shared": 100}}
    assert blocks_by_worker(request) == expected
    assert request.overlaps == {"a": 100, "b": 100, "c": 100}


def test_a_burst_spreads_over_the_queues_of_a_tier() -> None:
    """Two workers hold the blocks of all prompts."""
    cluster = FakeCluster(2)
    for name in "ab":
        report(cluster, name, host=QUICK_S)
        cluster.view.lower.store(name, "host", range(1, 10_000))
    for number in range(8):
        start = 1 + 1_000 * number
        cluster.submit(11_300, range(start, start + 700))
    workers = [placed.worker.name for placed in cluster.place().values()]
    assert sorted(workers) == ["a"] * 4 + ["b"] * 4
    queues = cluster.worker_states["a"].tier_queues
    assert queues is not None
    request = cluster.submit(TOKENS, range(9_000, 9_000 + len(HASHES)))
    waits_ms = queues.load_ms(request.loads["a"], cluster.now)
    assert waits_ms == pytest.approx((4 * 700 + len(HASHES)) * QUICK_S * 1e3)


def test_the_first_token_is_expected_after_the_load() -> None:
    cluster = FakeCluster(1)
    report(cluster, "a", host=1e-4)
    cluster.view.lower.store("a", "host", HASHES[:-1])
    worker = cluster.worker_states["a"]
    placed = place(cluster).placed
    assert placed.load_ms == pytest.approx(len(HASHES[:-1]) * 0.1)
    prefill_ms = worker.predict_prefill_ms(BLOCK)
    expected_ms = (placed.expected_first_token_s - cluster.now) * 1e3
    assert expected_ms == pytest.approx(placed.load_ms + prefill_ms)
    base = worker.latency_model.prefill.base
    cluster.first_token(placed, cluster.now + expected_ms * 1e-3)
    assert worker.latency_model.prefill.base == pytest.approx(base, rel=0.01), "no load is learnt"


def test_a_load_during_the_backlog_costs_nothing() -> None:
    cluster = FakeCluster(1)
    report(cluster, "a", host=1e-4)
    cluster.view.lower.store("a", "host", HASHES)
    cluster.add_prefill("a", 60_000)
    request = cluster.submit(TOKENS, HASHES)
    terms = cluster.solver.cost.terms(request, cluster.worker_states["a"], cluster.now)
    assert terms["load"] == 0.0
    assert terms["queue"] > 100


def test_costs_over_arrays_are_those_of_the_workers() -> None:
    from dynamo.scheduling.router.worker_arrays import WorkerArrays

    cluster = FakeCluster(LARGE_FLEET)
    for number, name in enumerate(cluster.names):
        report(cluster, name, host=QUICK_S * (number + 1), shared=QUICK_S)
        cluster.view.lower.store(name, "host", HASHES[: number + 1])
    cluster.view.lower.store("x", "shared", HASHES[50:150])
    request = cluster.submit(TOKENS, HASHES)
    cost = PredictedCost()
    arrays = WorkerArrays(cluster.worker_states)
    arrays.refresh(cluster.now)
    costs = cost.costs_of_all(request, arrays)
    row = cost.build_matrix(cluster.worker_states.workers, cluster.now).row(request)
    assert costs.tolist() == pytest.approx(row)
    best = min(range(len(row)), key=row.__getitem__)
    (result,) = cluster.solver.place(cluster.now)
    assert result.placed.worker.name == cluster.names[best]


def test_a_pair_uses_the_tiers_of_both_workers() -> None:
    cluster = make_pairs(["p1", "p2", "d1", "d2"], mode="always")
    for name in ("p2", "d2"):
        report(cluster, name, host=QUICK_S)
        cluster.view.lower.store(name, "host", HASHES[:200])
    result = place(cluster)
    assert result.placed.worker.name == "p2"
    assert result.placed.decode_worker is cluster.worker_states["d2"]
    best = result.cost_table()[0]
    assert (best.worker, best.decode_worker, best.tier_blocks) == ("p2", "d2", {"host": 200})
    assert best.terms["load"] > 0
    assert best.cost == pytest.approx(sum(best.terms.values()))
