"""Who gives way and who comes first when blocks are short."""

from __future__ import annotations

from array import array

import pytest

from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import EngineSequence, TokenContent
from dynamo.inference.step_scheduler import BatchLimits, HitsFrom, StepPlan, StepScheduler


def make(blocks: int, *, caching: bool = True, hits_from: HitsFrom = "computed") -> StepScheduler:
    pool = BlockPool(blocks, 4, prefix_caching=caching)
    return StepScheduler(pool, BatchLimits(8, 64, 400), hits_from=hits_from)


def tokens(first: int, count: int, priority: int = 0) -> EngineSequence:
    content = TokenContent(array("I", range(first, first + count)).tobytes(), 4)
    return EngineSequence(content, count, 10, priority=priority)


def step(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, [1] * sum(chunk.samples for chunk in plan.chunks))
    return plan


def worked_on(plan: StepPlan) -> list[EngineSequence]:
    return [chunk.sequence for chunk in plan.chunks]


def test_the_lower_priority_gives_way_though_it_came_first() -> None:
    scheduler = make(6)
    low, high = tokens(0, 11), tokens(50, 11, priority=1)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(high)
    assert worked_on(step(scheduler)) == [low, high]
    assert worked_on(step(scheduler)) == [high]
    assert (low.preemptions, high.preemptions) == (1, 0)


@pytest.fixture
def short_of_blocks() -> tuple[StepScheduler, EngineSequence, EngineSequence]:
    """The next step needs one block more than there are."""
    scheduler = make(6)
    first, last = tokens(0, 11), tokens(50, 11)
    scheduler.add(first)
    scheduler.add(last)
    step(scheduler)
    step(scheduler)
    return scheduler, first, last


def test_nobody_is_admitted_in_a_step_that_sends_somebody_back(
    short_of_blocks: tuple[StepScheduler, EngineSequence, EngineSequence],
) -> None:
    scheduler, first, last = short_of_blocks
    newcomer = tokens(90, 2, priority=1)
    scheduler.add(newcomer)
    assert worked_on(step(scheduler)) == [first]
    assert scheduler.preemptions == last.preemptions == 1
    assert newcomer in worked_on(step(scheduler))


def test_who_was_sent_back_comes_before_who_came_later(
    short_of_blocks: tuple[StepScheduler, EngineSequence, EngineSequence],
) -> None:
    scheduler, first, last = short_of_blocks
    newcomer = tokens(90, 2)
    scheduler.add(newcomer)
    assert worked_on(step(scheduler)) == [first]
    scheduler.remove(first)
    assert worked_on(step(scheduler)) == [last, newcomer]


def test_who_leaves_the_queue_is_not_computed_and_costs_nothing() -> None:
    scheduler = make(6)
    waits, other = tokens(0, 11), tokens(50, 11)
    scheduler.add(waits)
    scheduler.add(other)
    scheduler.remove(waits)
    scheduler.remove(waits)
    plan = step(scheduler)
    assert worked_on(plan) == [other]
    assert list(plan.released) == []
    assert scheduler.prefill_tokens() == 0


@pytest.mark.parametrize(
    ("caching", "hits_from"), [(False, "computed"), (False, "scheduled"), (True, "scheduled")]
)
def test_nothing_is_saved_where_nobody_would_load_it(caching: bool, hits_from: HitsFrom) -> None:
    scheduler = make(20, caching=caching, hits_from=hits_from)
    scheduler.add(tokens(0, 11))
    assert [chunk.save_blocks for chunk in step(scheduler).chunks] == [()]
