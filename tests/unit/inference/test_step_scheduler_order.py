"""The order of preemption and admission when blocks are short."""

from __future__ import annotations

from array import array

import pytest

from dynamo.core.values import EngineInfo
from dynamo.inference import step_scheduler
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import EngineSequence, TokenContent
from dynamo.inference.step_scheduler import HitsFrom, StepPlan, StepScheduler


def make_scheduler(
    blocks: int, *, caching: bool = True, hits_from: HitsFrom = "computed"
) -> StepScheduler:
    pool = BlockPool(blocks, 4, prefix_caching=caching)
    limits = EngineInfo("test", pool.block_tokens, blocks, 400, 8, 64)
    return StepScheduler(pool, limits, hits_from=hits_from)


def make_sequence(first: int, count: int, priority: int = 0) -> EngineSequence:
    content = TokenContent(array("I", range(first, first + count)).tobytes(), 4)
    return EngineSequence(content, count, 10, priority=priority)


def step(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, [1] * sum(chunk.samples for chunk in plan.chunks))
    return plan


def sequences_of(plan: StepPlan) -> list[EngineSequence]:
    return [chunk.sequence for chunk in plan.chunks]


def test_the_lower_priority_is_preempted_although_it_came_first() -> None:
    scheduler = make_scheduler(6)
    low, high = make_sequence(0, 11), make_sequence(50, 11, priority=1)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(high)
    assert sequences_of(step(scheduler)) == [low, high]
    assert sequences_of(step(scheduler)) == [high]
    assert (low.preemptions, high.preemptions) == (1, 0)


@pytest.fixture
def short_of_blocks() -> tuple[StepScheduler, EngineSequence, EngineSequence]:
    """Return a scheduler whose next step needs one block more than there are."""
    scheduler = make_scheduler(6)
    first, last = make_sequence(0, 11), make_sequence(50, 11)
    scheduler.add(first)
    scheduler.add(last)
    step(scheduler)
    step(scheduler)
    return scheduler, first, last


def test_a_step_that_preempts_admits_no_sequence(
    short_of_blocks: tuple[StepScheduler, EngineSequence, EngineSequence],
) -> None:
    scheduler, first, last = short_of_blocks
    newcomer = make_sequence(90, 2, priority=1)
    scheduler.add(newcomer)
    assert sequences_of(step(scheduler)) == [first]
    assert scheduler.preemptions == last.preemptions == 1
    assert newcomer in sequences_of(step(scheduler))


def test_a_preempted_sequence_is_admitted_before_later_arrivals(
    short_of_blocks: tuple[StepScheduler, EngineSequence, EngineSequence],
) -> None:
    scheduler, first, last = short_of_blocks
    newcomer = make_sequence(90, 2)
    scheduler.add(newcomer)
    assert sequences_of(step(scheduler)) == [first]
    scheduler.remove(first)
    assert sequences_of(step(scheduler)) == [last, newcomer]


def test_a_sequence_removed_from_the_queue_is_not_computed() -> None:
    scheduler = make_scheduler(6)
    waiting, other = make_sequence(0, 11), make_sequence(50, 11)
    scheduler.add(waiting)
    scheduler.add(other)
    scheduler.remove(waiting)
    scheduler.remove(waiting)
    plan = step(scheduler)
    assert sequences_of(plan) == [other]
    assert list(plan.released) == []
    assert scheduler.prefill_tokens() == 0


@pytest.mark.parametrize(
    ("caching", "hits_from"), [(False, "computed"), (False, "scheduled"), (True, "scheduled")]
)
def test_blocks_are_saved_only_if_they_can_be_loaded_later(
    caching: bool, hits_from: HitsFrom
) -> None:
    scheduler = make_scheduler(20, caching=caching, hits_from=hits_from)
    scheduler.add(make_sequence(0, 11))
    assert [chunk.save_blocks for chunk in step(scheduler).chunks] == [()]


def test_a_step_matches_a_bounded_number_of_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_scheduler, "MAX_MATCHED_BLOCKS", 9)
    scheduler = make_scheduler(40)
    scheduler.add(make_sequence(0, 21))
    step(scheduler)
    for _ in range(5):
        scheduler.add(make_sequence(0, 21))  # each matches five blocks
    admitted = []
    while scheduler.waiting:
        waiting = len(scheduler.waiting)
        step(scheduler)
        admitted.append(waiting - len(scheduler.waiting))
    assert admitted == [2, 2, 1]
