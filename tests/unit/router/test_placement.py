"""Who goes where, who waits, and that nothing herds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from tests.unit.router.stage import Stage

from dynamo.scheduling.router.costs.affinity import AffinityCost
from dynamo.scheduling.router.costs.predicted import PredictedCost, PredictedCostMatrix, TtftCost
from dynamo.scheduling.router.pending_request import PendingRequest
from dynamo.scheduling.router.placement.solver import HoldLimits
from dynamo.scheduling.router.worker_state import WorkerState

HASHES = list(range(1, 501))


def test_a_prompt_goes_to_who_holds_it() -> None:
    stage = Stage(4)
    stage.view.caches["c"] = set(HASHES[:400])
    assert stage.goes(8_000, HASHES) == "c"


def test_equals_are_chosen_by_chance() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen[Stage(4, seed=seed).goes(100)] += 1
    assert len(seen) == 4


def test_a_burst_of_one_prompt_shares_its_prefix() -> None:
    stage = Stage(4)
    arrivals = [stage.submit(8_020, HASHES) for _ in range(3)]
    (first,) = stage.place().values()
    stage.now += 0.2
    stage.placement.on_first_token(first, stage.now)
    stage.place()
    assert len(set(stage.view.routes)) == 1
    assert len(stage.view.routes) == len(arrivals)


def test_who_is_late_is_not_taken_for_free() -> None:
    """A worker that takes longer than was predicted is still at it."""
    stage = Stage(2)
    stage.view.caches["a"] = set(HASHES[:10])
    stage.busy("a", 800)
    stage.now += 5
    assert stage.goes(800, HASHES[:50]) == "b"


def test_a_hot_prefix_spreads_when_its_holder_saturates() -> None:
    stage = Stage(4)
    stage.view.caches["a"] = set(HASHES[:100])
    for _ in range(60):
        stage.submit(8_000, HASHES[:100])
    for _ in range(200):
        stage.place()
        stage.now += 0.05
        for book in stage.fleet.workers:
            if book.pending_prefills and book.prefill_free_s <= stage.now:
                for active in [one for one in book.active.values() if one.first_token_s is None]:
                    stage.placement.on_first_token(active, stage.now)
    per_worker = Counter(stage.view.routes)
    assert len(per_worker) == 4
    assert max(per_worker.values()) <= 30


def test_regret_goes_first() -> None:
    """Both want a; the one that has a second home gives way, though it came first."""
    stage = Stage(2)
    stage.view.caches["a"] = set(HASHES)
    stage.view.caches["b"] = set(HASHES[:450])
    own = list(range(900, 1_900))
    stage.view.caches["a"] |= set(own[:500])
    flexible = stage.submit(8_016, HASHES)
    bound = stage.submit(16_000, own)
    placed = stage.placement.place(stage.now)
    assert [one.request for one in placed] == [bound, flexible]
    assert [one.placed.worker.name for one in placed] == ["a", "b"]


def test_a_request_waits_for_a_worker_that_is_nearly_free() -> None:
    stage = Stage(1)
    busy = stage.busy("a", 8_000)
    arrival = stage.submit(100)
    assert stage.place() == {}
    due = stage.placement.next_run_s(stage.now)
    assert due is not None
    assert stage.now < due < stage.fleet["a"].prefill_free_s
    stage.placement.on_first_token(busy, stage.now + 0.01)
    assert arrival.id in stage.place()


def test_nobody_waits_longer_than_the_patience() -> None:
    stage = Stage(1, patience=HoldLimits(max_hold_s=0.5))
    stage.busy("a", 100_000)
    arrival = stage.submit(100)
    assert stage.place() == {}
    stage.now += 0.5
    assert arrival.id in stage.place()


def test_barred_workers_are_left_out() -> None:
    stage = Stage(3)
    stage.view.caches["a"] = set(HASHES)
    assert stage.goes(8_000, HASHES, barred=frozenset("ab")) == "c"


def test_who_has_no_worker_left_is_told() -> None:
    stage = Stage(2)
    lost = stage.submit(100, barred=frozenset("ab"))
    kept = stage.submit(100, barred=frozenset("a"))
    assert stage.placement.pop_unplaceable() == [lost]
    assert kept.id in stage.place()


def test_ends_without_a_first_token_settle_too() -> None:
    stage = Stage(1)
    arrival = stage.submit(100, HASHES[:6])
    active = stage.place()[arrival.id]
    assert stage.view.open == 1
    stage.placement.on_ended(active, stage.now)
    stage.placement.on_ended(active, stage.now)
    book = stage.fleet["a"]
    assert (book.pending_prefills, book.pending_prefill_tokens, len(book.active)) == (0, 0, 0)


def test_the_table_explains_the_choice() -> None:
    stage = Stage(3)
    stage.view.caches["b"] = set(HASHES[:50])
    stage.submit(800, HASHES[:50])
    (placed,) = stage.placement.place(stage.now)
    best = placed.cost_table[0]
    assert (best.worker, best.overlap_blocks) == ("b", 50)
    assert [one.cost for one in placed.cost_table] == sorted(one.cost for one in placed.cost_table)
    assert set(best.terms) == {"queue", "prefill", "harm", "eviction"}


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_prompts_that_begin_alike_and_come_at_once_know_of_each_other(threshold: float) -> None:
    stage = Stage(4, AffinityCost(), threshold=threshold)
    for _ in range(8):
        stage.submit(160, HASHES[:10])
    assert len(stage.place()) == 8
    assert len(set(stage.view.routes)) == 1


def test_who_waited_is_placed_by_what_workers_hold_now() -> None:
    stage = Stage(2, TtftCost(), threshold=1.0)
    busy = [stage.busy(name, 20_000) for name in stage.names]
    stage.submit(8_000, HASHES)
    assert stage.place() == {}
    stage.view.caches["b"] = set(HASHES)
    stage.now += 5
    for active in busy:
        stage.placement.on_first_token(active, stage.now)
    stage.place()
    assert stage.view.routes == ["b"]


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_who_waits_for_certain_workers_holds_up_nobody_else(threshold: float) -> None:
    stage = Stage(2, threshold=threshold)
    stage.busy("b", 60_000)
    for _ in range(3_000):
        stage.submit(2_000, barred=frozenset("a"))
    stage.submit(100, barred=frozenset("b"))
    stage.submit(100)
    stage.place()
    assert stage.view.routes == ["a", "a"]


def test_a_round_looks_at_no_prompt_while_no_worker_is_nearly_free() -> None:
    stage = Stage(2, threshold=2.0)
    for name in stage.names:
        stage.busy(name, 12_000)
    for _ in range(100):
        stage.submit(2_000)
    stage.place()
    stage.placement.cost.build_matrix = None  # type: ignore[method-assign, assignment]
    assert stage.place() == {}
    assert len(stage.placement) == 100


def test_who_has_just_come_is_not_held_up_by_many_who_would_rather_wait() -> None:
    stage = Stage(4)
    stage.view.caches["a"] = set(range(1, 1_001))
    stage.busy("a", 6_000)
    for _ in range(60):
        stage.submit(16_016, list(range(1, 1_001)))
    assert stage.place() == {}
    stage.now += 0.01
    assert stage.goes(100) in {"b", "c", "d"}


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
        self.last = Counted(books, now, 5.0, 0.5)
        return self.last


def test_short_prompts_fill_a_step_together_and_a_long_one_does_not() -> None:
    stage = Stage(1)
    for _ in range(30):
        stage.busy("a", 200)
    assert stage.goes(200) == "a"
    stage = Stage(1)
    stage.busy("a", 6_000)
    stage.submit(200)
    assert stage.place() == {}
    assert stage.fleet["a"].backlog_ms(stage.now) > 50


def test_a_burst_of_short_prompts_that_nobody_holds_is_priced_once_each() -> None:
    cost = CountedCost()
    stage = Stage(4, cost)
    for number in range(12):
        stage.submit(160, [1_000 * number + block for block in range(10)])
    assert len(stage.place()) == 12
    assert (cost.last.rows, cost.last.updates) == (12, 0)
    assert sorted(Counter(stage.view.routes).values()) == [3, 3, 3, 3]


def test_of_short_prompts_that_begin_alike_the_second_knows_of_the_first() -> None:
    stage = Stage(4)
    for number in range(1, 6):
        stage.submit(160 + number, [1_000 * number + block for block in range(10)])
    twins = [stage.submit(tokens, HASHES[:10]) for tokens in (160, 170)]
    placed = stage.place()
    first = placed[twins[1].id].worker.name
    assert twins[0].overlaps == {first: 10}


def test_who_stands_behind_one_that_would_rather_wait_is_not_priced() -> None:
    cost = CountedCost()
    stage = Stage(2, cost)
    stage.busy("b", 2_000)
    stage.now += 5
    stage.busy("a", 4_000)
    for _ in range(12):
        stage.submit(160)
    assert stage.place() == {}
    assert cost.last.rows == 1
    stage.now += 3
    assert len(stage.place()) == 12


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_goes_once_and_where_it_may(seed: int) -> None:
    rng = Random(seed)
    stage = Stage(3, seed=seed)
    barred: dict[str, frozenset[str]] = {}
    gone: list[str] = []
    for _ in range(60):
        for _ in range(rng.randrange(20)):
            tokens = rng.choice((20, 160, 900, 6_000))
            root = rng.choice((0, rng.randrange(1, 1_000))) * 1_000
            out = rng.choice((frozenset(), frozenset(), frozenset(rng.choice("abc"))))
            hashes = range(root, root + tokens // 16)
            barred[stage.submit(tokens, hashes, barred=out).id] = out
        placed = stage.place()
        gone += placed
        assert not any(active.worker.name in barred[name] for name, active in placed.items())
        for active in list(placed.values())[::2]:
            stage.placement.on_first_token(active, stage.now)
        stage.now += 0.02
    stage.now += 10
    while placed := stage.place():
        gone += placed
    assert sorted(gone) == sorted(barred)
