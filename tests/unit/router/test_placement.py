"""Who goes where, who waits, and that nothing herds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from tests.unit.router.fake_cluster import FakeCluster

from dynamo.scheduling.router.costs.affinity import AffinityCost
from dynamo.scheduling.router.costs.predicted import PredictedCost, PredictedCostMatrix, TtftCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import HoldLimits
from dynamo.scheduling.router.worker_state import WorkerState

HASHES = list(range(1, 501))


def test_a_prompt_goes_to_who_holds_it() -> None:
    cluster = FakeCluster(4)
    cluster.view.caches["c"] = set(HASHES[:400])
    assert cluster.route(8_000, HASHES) == "c"


def test_equals_are_chosen_by_chance() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen[FakeCluster(4, seed=seed).route(100)] += 1
    assert len(seen) == 4


def test_a_burst_of_one_prompt_shares_its_prefix() -> None:
    cluster = FakeCluster(4)
    arrivals = [cluster.submit(8_020, HASHES) for _ in range(3)]
    (first,) = cluster.place().values()
    cluster.now += 0.2
    cluster.solver.on_first_token(first, cluster.now)
    cluster.place()
    assert len(set(cluster.view.routes)) == 1
    assert len(cluster.view.routes) == len(arrivals)


def test_who_is_late_is_not_taken_for_free() -> None:
    """A worker that takes longer than was predicted is still at it."""
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
        for book in cluster.worker_states.workers:
            if book.pending_prefills and book.prefill_free_s <= cluster.now:
                for active in [one for one in book.active.values() if one.first_token_s is None]:
                    cluster.solver.on_first_token(active, cluster.now)
    per_worker = Counter(cluster.view.routes)
    assert len(per_worker) == 4
    assert max(per_worker.values()) <= 30


def test_regret_goes_first() -> None:
    """Both want a; the one that has a second home gives way, though it came first."""
    cluster = FakeCluster(2)
    cluster.view.caches["a"] = set(HASHES)
    cluster.view.caches["b"] = set(HASHES[:450])
    own = list(range(900, 1_900))
    cluster.view.caches["a"] |= set(own[:500])
    flexible = cluster.submit(8_016, HASHES)
    bound = cluster.submit(16_000, own)
    placed = cluster.solver.place(cluster.now)
    assert [one.request for one in placed] == [bound, flexible]
    assert [one.placed.worker.name for one in placed] == ["a", "b"]


def test_a_request_waits_for_a_worker_that_is_nearly_free() -> None:
    cluster = FakeCluster(1)
    busy = cluster.add_prefill("a", 8_000)
    arrival = cluster.submit(100)
    assert cluster.place() == {}
    due = cluster.solver.next_run_s(cluster.now)
    assert due is not None
    assert cluster.now < due < cluster.worker_states["a"].prefill_free_s
    cluster.solver.on_first_token(busy, cluster.now + 0.01)
    assert arrival.id in cluster.place()


def test_nobody_waits_longer_than_the_patience() -> None:
    cluster = FakeCluster(1, hold_limits=HoldLimits(max_hold_s=0.5))
    cluster.add_prefill("a", 100_000)
    arrival = cluster.submit(100)
    assert cluster.place() == {}
    cluster.now += 0.5
    assert arrival.id in cluster.place()


def test_barred_workers_are_left_out() -> None:
    cluster = FakeCluster(3)
    cluster.view.caches["a"] = set(HASHES)
    assert cluster.route(8_000, HASHES, excluded=frozenset("ab")) == "c"


def test_who_has_no_worker_left_is_told() -> None:
    cluster = FakeCluster(2)
    lost = cluster.submit(100, excluded=frozenset("ab"))
    kept = cluster.submit(100, excluded=frozenset("a"))
    assert cluster.solver.pop_unplaceable() == [lost]
    assert kept.id in cluster.place()


def test_ends_without_a_first_token_settle_too() -> None:
    cluster = FakeCluster(1)
    arrival = cluster.submit(100, HASHES[:6])
    active = cluster.place()[arrival.id]
    assert cluster.view.open_prefills == 1
    cluster.solver.on_ended(active, cluster.now)
    cluster.solver.on_ended(active, cluster.now)
    book = cluster.worker_states["a"]
    assert (book.pending_prefills, book.pending_prefill_tokens, len(book.active)) == (0, 0, 0)


def test_the_table_explains_the_choice() -> None:
    cluster = FakeCluster(3)
    cluster.view.caches["b"] = set(HASHES[:50])
    cluster.submit(800, HASHES[:50])
    (placed,) = cluster.solver.place(cluster.now)
    best = placed.cost_table[0]
    assert (best.worker, best.overlap_blocks) == ("b", 50)
    assert [one.cost for one in placed.cost_table] == sorted(one.cost for one in placed.cost_table)
    assert set(best.terms) == {"queue", "prefill", "harm", "eviction"}


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_prompts_that_begin_alike_and_come_at_once_know_of_each_other(threshold: float) -> None:
    cluster = FakeCluster(4, AffinityCost(), threshold=threshold)
    for _ in range(8):
        cluster.submit(160, HASHES[:10])
    assert len(cluster.place()) == 8
    assert len(set(cluster.view.routes)) == 1


def test_who_waited_is_placed_by_what_workers_hold_now() -> None:
    cluster = FakeCluster(2, TtftCost(), threshold=1.0)
    busy = [cluster.add_prefill(name, 20_000) for name in cluster.names]
    cluster.submit(8_000, HASHES)
    assert cluster.place() == {}
    cluster.view.caches["b"] = set(HASHES)
    cluster.now += 5
    for active in busy:
        cluster.solver.on_first_token(active, cluster.now)
    cluster.place()
    assert cluster.view.routes == ["b"]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_who_waits_for_certain_workers_holds_up_nobody_else(threshold: float) -> None:
    cluster = FakeCluster(2, threshold=threshold)
    cluster.add_prefill("b", 60_000)
    for _ in range(3_000):
        cluster.submit(2_000, excluded=frozenset("a"))
    cluster.submit(100, excluded=frozenset("b"))
    cluster.submit(100)
    cluster.place()
    assert cluster.view.routes == ["a", "a"]


def test_a_round_looks_at_no_prompt_while_no_worker_is_nearly_free() -> None:
    cluster = FakeCluster(2, threshold=2.0)
    for name in cluster.names:
        cluster.add_prefill(name, 12_000)
    for _ in range(100):
        cluster.submit(2_000)
    cluster.place()
    cluster.solver.cost.build_matrix = None  # type: ignore[method-assign, assignment]
    assert cluster.place() == {}
    assert len(cluster.solver) == 100


def test_who_has_just_come_is_not_held_up_by_many_who_would_rather_wait() -> None:
    cluster = FakeCluster(4)
    cluster.view.caches["a"] = set(range(1, 1_001))
    cluster.add_prefill("a", 6_000)
    for _ in range(60):
        cluster.submit(16_016, list(range(1, 1_001)))
    assert cluster.place() == {}
    cluster.now += 0.01
    assert cluster.route(100) in {"b", "c", "d"}


class Counted(PredictedCostMatrix):
    """Counts how often a prompt is priced."""

    rows = 0
    updates = 0

    def row(self, request: PendingRequest) -> list[float]:
        self.rows += 1
        return super().row(request)

    def column(self, requests: Sequence[PendingRequest], at: int) -> list[float]:
        self.updates += len(requests)
        return super().column(requests, at)


class CountedCost(PredictedCost):
    """`last`: of the last round."""

    last: Counted

    def build_matrix(self, books: Sequence[WorkerState], now: float) -> Counted:
        self.last = Counted(self, books, now)
        return self.last


def test_short_prompts_fill_a_step_together_and_a_long_one_does_not() -> None:
    cluster = FakeCluster(1)
    for _ in range(30):
        cluster.add_prefill("a", 200)
    assert cluster.route(200) == "a"
    cluster = FakeCluster(1)
    cluster.add_prefill("a", 6_000)
    cluster.submit(200)
    assert cluster.place() == {}
    assert cluster.worker_states["a"].backlog_ms(cluster.now) > 50


def test_a_burst_of_short_prompts_that_nobody_holds_is_priced_once_each() -> None:
    cost = CountedCost()
    cluster = FakeCluster(4, cost)
    for number in range(12):
        cluster.submit(160, [1_000 * number + block for block in range(10)])
    assert len(cluster.place()) == 12
    assert (cost.last.rows, cost.last.updates) == (12, 0)
    assert sorted(Counter(cluster.view.routes).values()) == [3, 3, 3, 3]


def test_of_short_prompts_that_begin_alike_the_second_knows_of_the_first() -> None:
    cluster = FakeCluster(4)
    for number in range(1, 6):
        cluster.submit(160 + number, [1_000 * number + block for block in range(10)])
    twins = [cluster.submit(tokens, HASHES[:10]) for tokens in (160, 170)]
    placed = cluster.place()
    first = placed[twins[1].id].worker.name
    assert twins[0].overlaps == {first: 10}


def test_who_stands_behind_one_that_would_rather_wait_is_not_priced() -> None:
    cost = CountedCost()
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
def test_whatever_comes_goes_once_and_where_it_may(seed: int) -> None:
    rng = Random(seed)
    cluster = FakeCluster(3, seed=seed)
    barred: dict[str, frozenset[str]] = {}
    gone: list[str] = []
    for _ in range(60):
        for _ in range(rng.randrange(20)):
            tokens = rng.choice((20, 160, 900, 6_000))
            root = rng.choice((0, rng.randrange(1, 1_000))) * 1_000
            out = rng.choice((frozenset(), frozenset(), frozenset(rng.choice("abc"))))
            hashes = range(root, root + tokens // 16)
            barred[cluster.submit(tokens, hashes, excluded=out).id] = out
        placed = cluster.place()
        gone += placed
        assert not any(active.worker.name in barred[name] for name, active in placed.items())
        for active in list(placed.values())[::2]:
            cluster.solver.on_first_token(active, cluster.now)
        cluster.now += 0.02
    cluster.now += 10
    while placed := cluster.place():
        gone += placed
    assert sorted(gone) == sorted(barred)
