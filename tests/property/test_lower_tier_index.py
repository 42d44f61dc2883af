"""The index of lower tiers against a reference: (worker, tier) -> held blocks."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.core.values import Tier
from dynamo.scheduling.index.tiered_index import ANY_WORKER, LOWER_TIERS, LowerTierIndex, TierRun

PROMPT = [977 * (number + 1) for number in range(8)]
workers = st.sampled_from("abcd")
blocks = st.lists(st.sampled_from(PROMPT), max_size=8)
updates = st.tuples(
    st.sampled_from(["store", "remove"]), workers, st.sampled_from(LOWER_TIERS), blocks
)
deaths = st.tuples(st.just("die"), workers)
Held = dict[tuple[str, Tier], set[int]]


def expected_runs(held: Held, worker: str, start: int) -> list[TierRun]:
    runs: list[TierRun] = []
    for block in PROMPT[start:]:
        owners = {tier: ANY_WORKER if tier == "shared" else worker for tier in LOWER_TIERS}
        tier = next((tier for tier in LOWER_TIERS if block in held[owners[tier], tier]), None)
        if tier is None:
            break
        if runs and runs[-1].tier == tier:
            runs[-1] = TierRun(tier, runs[-1].blocks + 1)
        else:
            runs.append(TierRun(tier, 1))
    return runs


@settings(max_examples=300)
@given(
    st.lists(st.one_of(updates, updates, deaths), max_size=30),
    st.dictionaries(workers, st.integers(1, 8), max_size=4),
)
def test_runs_are_exact(operations: list[tuple], overlaps: dict[str, int]) -> None:  # type: ignore[type-arg]
    index, held = LowerTierIndex(), defaultdict(set)
    for operation, worker, *rest in operations:
        if operation == "die":
            index.remove_worker(worker)
            held = defaultdict(set, {key: each for key, each in held.items() if key[0] != worker})
            continue
        tier, changed = rest
        owner = ANY_WORKER if tier == "shared" else worker
        if operation == "store":
            index.store(worker, tier, changed)
            held[owner, tier] |= set(changed)
        else:
            index.remove(worker, tier, changed)
            held[owner, tier] -= set(changed)
    runs = index.find_runs(PROMPT, overlaps)
    for worker in "abcd":
        start = overlaps.get(worker, 0)
        expected = expected_runs(held, worker, start)
        if worker in runs or start:
            assert runs.get(worker, []) == expected
        else:
            assert runs.get(ANY_WORKER, []) == expected
    assert runs.get(ANY_WORKER, []) == expected_runs(held, ANY_WORKER, 0)


def test_blocks_of_dead_workers_are_removed_step_by_step() -> None:
    index = LowerTierIndex()
    for _ in range(3):
        index.store("a", "host", range(5_000))
        index.store("b", "host", range(4_000, 5_000))
        index.remove_worker("a")
        for _ in range(256):
            index.store("b", "disk", ())
        assert index.block_count == 1_000
        assert index.find_runs(range(4_000, 6_000), {}) == {"b": [("host", 1_000)]}


def test_the_budget_evicts_blocks_that_were_stored_first() -> None:
    index = LowerTierIndex(1 << 20)
    index.store("a", "host", range(1, 100_000))
    assert index.bytes_used <= 1 << 20
    assert index.block_count + index.evicted_blocks == 99_999
    assert index.find_runs(range(99_000, 100_000), {}) == {"a": [("host", 1_000)]}
    assert index.find_runs([1], {}) == {}
