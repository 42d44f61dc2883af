"""Who goes where, who waits, and that nothing herds."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.unit.router.stage import Stage

from dynamo.scheduling.router.placing.costs import AffinityCost, TtftCost
from dynamo.scheduling.router.placing.placement import Patience

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
    stage.placement.first_token(first, stage.now)
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
        for book in stage.fleet.books:
            if book.open_count and book.free_s <= stage.now:
                for active in [one for one in book.active.values() if one.first_s is None]:
                    stage.placement.first_token(active, stage.now)
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
    assert [one.arrival for one in placed] == [bound, flexible]
    assert [one.active.book.name for one in placed] == ["a", "b"]


def test_a_request_waits_for_a_worker_that_is_nearly_free() -> None:
    stage = Stage(1)
    busy = stage.busy("a", 8_000)
    arrival = stage.submit(100)
    assert stage.place() == {}
    due = stage.placement.next_due(stage.now)
    assert due is not None
    assert stage.now < due < stage.fleet["a"].free_s
    stage.placement.first_token(busy, stage.now + 0.01)
    assert arrival.id in stage.place()


def test_nobody_waits_longer_than_the_patience() -> None:
    stage = Stage(1, patience=Patience(longest_s=0.5))
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
    assert stage.placement.stranded() == [lost]
    assert kept.id in stage.place()


def test_ends_without_a_first_token_settle_too() -> None:
    stage = Stage(1)
    arrival = stage.submit(100, HASHES[:6])
    active = stage.place()[arrival.id]
    assert stage.view.open == 1
    stage.placement.ended(active, stage.now)
    stage.placement.ended(active, stage.now)
    book = stage.fleet["a"]
    assert (book.open_count, book.open_tokens, len(book.active)) == (0, 0, 0)


def test_the_table_explains_the_choice() -> None:
    stage = Stage(3)
    stage.view.caches["b"] = set(HASHES[:50])
    stage.submit(800, HASHES[:50])
    (placed,) = stage.placement.place(stage.now)
    best = placed.table[0]
    assert (best.worker, best.overlap_blocks) == ("b", 50)
    assert [one.cost for one in placed.table] == sorted(one.cost for one in placed.table)
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
        stage.placement.first_token(active, stage.now)
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
    stage.placement.cost.prices = None  # type: ignore[method-assign, assignment]
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
