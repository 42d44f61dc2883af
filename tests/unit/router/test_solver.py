"""The placement solver: choice of worker, holding, and the spread of bursts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.scheduling.router.costs.alternatives import AffinityCost
from dynamo.scheduling.router.costs.predicted import PredictedCost, PredictedCostMatrix, TtftCost
from dynamo.scheduling.router.placement.candidates import HoldLimits
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.worker import WorkerState

HASHES = list(range(1, 501))


def test_a_prompt_goes_to_the_worker_that_holds_it() -> None:
    cluster = FakeCluster(4)
    cluster.view.caches["c"] = set(HASHES[:400])
    assert cluster.route(8_000, HASHES) == "c"


def test_ties_are_broken_at_random() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen[FakeCluster(4, seed=seed).route(100)] += 1
    assert len(seen) == 4


def test_a_burst_of_one_prompt_shares_its_prefix() -> None:
    cluster = FakeCluster(4)
    requests = [cluster.submit(8_020, HASHES) for _ in range(3)]
    (first,) = cluster.place().values()
    cluster.now += 0.2
    cluster.first_token(first)
    cluster.place()
    assert len(set(cluster.view.routes)) == 1
    assert len(cluster.view.routes) == len(requests)


def test_a_late_worker_does_not_count_as_free() -> None:
    """A prefill that takes longer than predicted is still pending."""
    cluster = FakeCluster(2)
    cluster.view.caches["a"] = set(HASHES[:10])
    cluster.add_prefill("a", 800)
    cluster.now += 5
    assert cluster.route(800, HASHES[:50]) == "b"


def test_a_hot_prefix_spreads_when_its_holder_saturates() -> None:
    cluster = FakeCluster(4)
    cluster.view.caches["a"] = set(HASHES[:100])
    for _ in range(60):
        cluster.submit(8_000, HASHES[:100])
    for _ in range(200):
        cluster.place()
        cluster.now += 0.05
        for worker in cluster.worker_states.workers:
            if worker.pending_prefills and worker.prefill_free_s <= cluster.now:
                for active in [
                    placed for placed in worker.active.values() if placed.first_token_s is None
                ]:
                    cluster.first_token(active)
    per_worker = Counter(cluster.view.routes)
    assert len(per_worker) == 4
    assert max(per_worker.values()) <= 30


def test_the_request_with_more_regret_is_placed_first() -> None:
    """Both prefer a. The first request gives way, since b holds most of its prompt too."""
    cluster = FakeCluster(2)
    cluster.view.caches["a"] = set(HASHES)
    cluster.view.caches["b"] = set(HASHES[:450])
    own = list(range(900, 1_900))
    cluster.view.caches["a"] |= set(own[:500])
    flexible = cluster.submit(8_016, HASHES)
    committed = cluster.submit(16_000, own)
    placed = cluster.solver.place(cluster.now)
    assert [result.request for result in placed] == [committed, flexible]
    assert [result.placed.worker.name for result in placed] == ["a", "b"]


def test_a_request_is_held_for_a_nearly_free_worker() -> None:
    cluster = FakeCluster(1)
    busy = cluster.add_prefill("a", 8_000)
    request = cluster.submit(100)
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due is not None
    assert cluster.now < due < cluster.worker_states["a"].prefill_free_s
    cluster.first_token(busy, cluster.now + 0.01)
    assert request.id in cluster.place()


def test_no_request_is_held_longer_than_max_hold_s() -> None:
    cluster = FakeCluster(1, hold_limits=HoldLimits(max_hold_s=0.5))
    cluster.add_prefill("a", 100_000)
    request = cluster.submit(100)
    assert cluster.place() == {}
    cluster.now += 0.5
    assert request.id in cluster.place()


def test_excluded_workers_are_not_chosen() -> None:
    cluster = FakeCluster(3)
    cluster.view.caches["a"] = set(HASHES)
    assert cluster.route(8_000, HASHES, excluded=frozenset("ab")) == "c"


def test_a_request_without_a_worker_is_unplaceable() -> None:
    cluster = FakeCluster(2)
    unplaceable = cluster.submit(100, excluded=frozenset("ab"))
    kept_request = cluster.submit(100, excluded=frozenset("a"))
    assert cluster.solver.pop_unplaceable() == [unplaceable]
    assert kept_request.id in cluster.place()


def test_an_end_without_a_first_token_ends_the_prefill() -> None:
    cluster = FakeCluster(1)
    request = cluster.submit(100, HASHES[:6])
    active = cluster.place()[request.id]
    assert cluster.view.open_prefills == 1
    cluster.end(active)
    cluster.end(active)
    worker = cluster.worker_states["a"]
    assert (worker.pending_prefills, worker.pending_prefill_tokens, len(worker.active)) == (0, 0, 0)


def test_the_cost_table_is_sorted_and_has_all_terms() -> None:
    cluster = FakeCluster(3)
    cluster.view.caches["b"] = set(HASHES[:50])
    cluster.submit(800, HASHES[:50])
    (placed,) = cluster.solver.place(cluster.now)
    best = placed.cost_table()[0]
    assert (best.worker, best.overlap_blocks) == ("b", 50)
    costs = [candidate.cost for candidate in placed.cost_table()]
    assert costs == sorted(costs)
    assert set(best.terms) == {"queue", "prefill", "harm", "eviction"}


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_simultaneous_prompts_with_a_common_prefix_go_to_one_worker(threshold: float) -> None:
    cluster = FakeCluster(4, AffinityCost(), threshold=threshold)
    for _ in range(8):
        cluster.submit(160, HASHES[:10])
    assert len(cluster.place()) == 8
    assert len(set(cluster.view.routes)) == 1


def test_a_held_request_is_placed_by_current_overlaps() -> None:
    cluster = FakeCluster(2, TtftCost(), threshold=1.0)
    busy = [cluster.add_prefill(name, 20_000) for name in cluster.names]
    cluster.submit(8_000, HASHES)
    assert cluster.place() == {}
    cluster.view.caches["b"] = set(HASHES)
    cluster.now += 5
    for active in busy:
        cluster.first_token(active)
    cluster.place()
    assert cluster.view.routes == ["b"]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_requests_for_busy_workers_do_not_block_others(threshold: float) -> None:
    cluster = FakeCluster(2, threshold=threshold)
    cluster.add_prefill("b", 60_000)
    for _ in range(3_000):
        cluster.submit(2_000, excluded=frozenset("a"))
    cluster.submit(100, excluded=frozenset("b"))
    cluster.submit(100)
    cluster.place()
    assert cluster.view.routes == ["a", "a"]


def test_a_round_without_a_nearly_free_worker_computes_no_costs() -> None:
    cluster = FakeCluster(2, threshold=2.0)
    for name in cluster.names:
        cluster.add_prefill(name, 12_000)
    for _ in range(100):
        cluster.submit(2_000)
    cluster.place()
    cluster.solver.cost.build_matrix = None  # type: ignore[method-assign, assignment]
    assert cluster.place() == {}
    assert len(cluster.solver) == 100


def test_held_requests_do_not_block_a_new_request() -> None:
    cluster = FakeCluster(4)
    cluster.view.caches["a"] = set(range(1, 1_001))
    cluster.add_prefill("a", 6_000)
    for _ in range(60):
        cluster.submit(16_016, list(range(1, 1_001)))
    assert cluster.place() == {}
    cluster.now += 0.01
    assert cluster.route(100) in {"b", "c", "d"}


class CountingMatrix(PredictedCostMatrix):
    """Count the computed rows and column entries."""

    rows = 0
    updates = 0

    def row(self, request: PendingRequest) -> list[float]:
        self.rows += 1
        return super().row(request)

    def column(self, requests: Sequence[PendingRequest], at: int) -> list[float]:
        self.updates += len(requests)
        return super().column(requests, at)


class CountingCost(PredictedCost):
    """A cost that keeps the matrix of the last round."""

    last: CountingMatrix

    def build_matrix(self, workers: Sequence[WorkerState], now: float) -> CountingMatrix:
        self.last = CountingMatrix(self, workers, now)
        return self.last


def test_short_prompts_share_a_step_and_long_ones_do_not() -> None:
    cluster = FakeCluster(1)
    for _ in range(30):
        cluster.add_prefill("a", 200)
    assert cluster.route(200) == "a"
    cluster = FakeCluster(1)
    cluster.add_prefill("a", 6_000)
    cluster.submit(200)
    assert cluster.place() == {}
    assert cluster.worker_states["a"].backlog_ms(cluster.now) > 50


def test_each_uncached_short_prompt_of_a_burst_gets_one_row() -> None:
    cost = CountingCost()
    cluster = FakeCluster(4, cost)
    for number in range(12):
        cluster.submit(160, [1_000 * number + block for block in range(10)])
    assert len(cluster.place()) == 12
    assert (cost.last.rows, cost.last.updates) == (12, 0)
    assert sorted(Counter(cluster.view.routes).values()) == [3, 3, 3, 3]


def test_the_second_of_two_similar_short_prompts_sees_the_overlap() -> None:
    cluster = FakeCluster(4)
    for number in range(1, 6):
        cluster.submit(160 + number, [1_000 * number + block for block in range(10)])
    twins = [cluster.submit(tokens, HASHES[:10]) for tokens in (160, 170)]
    placed = cluster.place()
    first = placed[twins[1].id].worker.name
    assert twins[0].overlaps == {first: 10}


def test_requests_queued_behind_a_held_one_get_no_row() -> None:
    cost = CountingCost()
    cluster = FakeCluster(2, cost)
    cluster.add_prefill("b", 2_000)
    cluster.now += 5
    cluster.add_prefill("a", 4_000)
    for _ in range(12):
        cluster.submit(160)
    assert cluster.place() == {}
    assert cost.last.rows == 1
    cluster.now += 3
    assert len(cluster.place()) == 12


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_placed_once_on_an_allowed_worker(seed: int) -> None:
    rng = Random(seed)
    cluster = FakeCluster(3, seed=seed)
    excluded_by_id: dict[str, frozenset[str]] = {}
    placed_ids: list[str] = []
    for _ in range(60):
        for _ in range(rng.randrange(20)):
            tokens = rng.choice((20, 160, 900, 6_000))
            root = rng.choice((0, rng.randrange(1, 1_000))) * 1_000
            excluded = rng.choice((frozenset(), frozenset(), frozenset(rng.choice("abc"))))
            hashes = range(root, root + tokens // 16)
            excluded_by_id[cluster.submit(tokens, hashes, excluded=excluded).id] = excluded
        placed = cluster.place()
        placed_ids += placed
        assert not any(
            active.worker.name in excluded_by_id[name] for name, active in placed.items()
        )
        for active in list(placed.values())[::2]:
            cluster.first_token(active)
        cluster.now += 0.02
    cluster.now += 10
    while placed := cluster.place():
        placed_ids += placed
    assert sorted(placed_ids) == sorted(excluded_by_id)
