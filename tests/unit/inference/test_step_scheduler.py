"""What one step holds: budget, chunks, admission, preemption, what is loaded and saved."""

from __future__ import annotations

from array import array

import pytest

from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import EngineSequence, SequenceContent, TokenContent
from dynamo.inference.step_scheduler import BatchLimits, StepScheduler


def make(blocks=100, budget=64, seqs=8, context=400, hits_from="computed"):
    pool = BlockPool(blocks, 4)
    return StepScheduler(pool, BatchLimits(seqs, budget, context), hits_from=hits_from)


def tokens(ids, max_tokens=10, priority=0):
    content = TokenContent(array("I", ids).tobytes(), 4)
    return EngineSequence(content, len(ids), max_tokens, priority=priority)


def step(scheduler, token=1):
    plan = scheduler.schedule()
    scheduler.complete(plan, [token] * sum(chunk.samples for chunk in plan.chunks))
    return plan


def shape(plan):
    return [(chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]


def test_a_long_prompt_comes_in_chunks_and_others_share_the_budget():
    scheduler = make(budget=10)
    scheduler.add(tokens(range(25)))
    scheduler.add(tokens(range(100, 108)))
    assert shape(step(scheduler)) == [(0, 10, False)]
    assert shape(step(scheduler)) == [(10, 10, False)]
    assert shape(step(scheduler)) == [(20, 5, True), (0, 5, False)]
    plan = step(scheduler)
    assert shape(plan) == [(25, 1, True), (5, 3, True)]
    assert (plan.new_tokens, plan.decode_seqs, plan.decode_context) == (3, 1, 26)


def test_idle_and_busy_are_told_apart():
    scheduler = make()
    assert scheduler.schedule() is None
    one = tokens(range(5))
    scheduler.add(one)
    assert not step(scheduler).back_to_back
    assert step(scheduler).back_to_back
    scheduler.remove(one)
    assert scheduler.schedule() is None
    scheduler.add(tokens(range(5)))
    assert not step(scheduler).back_to_back


def test_places_are_limited_and_priority_goes_first():
    scheduler = make(seqs=2)
    low, high, later = tokens(range(3)), tokens(range(9, 12), priority=1), tokens(range(6))
    for one in (low, later, high):
        scheduler.add(one)
    assert [chunk.sequence for chunk in step(scheduler).chunks] == [high, low]
    scheduler.remove(high)
    assert [chunk.sequence for chunk in step(scheduler).chunks] == [low, later]


def test_the_last_is_preempted_and_comes_back_by_what_is_cached():
    scheduler = make(blocks=6)
    first, last = tokens(range(11)), tokens(range(50, 61))
    scheduler.add(first)
    scheduler.add(last)
    step(scheduler)
    step(scheduler)  # both fill three blocks
    plan = step(scheduler)
    assert [chunk.sequence for chunk in plan.chunks] == [first]
    assert list(plan.released) == [last]
    assert last.preemptions == 1
    scheduler.remove(first)
    plan = step(scheduler)
    (chunk,) = plan.chunks
    assert chunk.sequence is last
    assert (chunk.start, chunk.count, len(chunk.load_block_ids)) == (8, 5, 2)
    assert plan.new_tokens == 5
    assert last.cached_tokens == 0  # of the first admission


def test_what_is_saved_and_loaded():
    scheduler = make()
    first = tokens(range(10))
    scheduler.add(first)
    chunk = step(scheduler).chunks[0]
    assert chunk.save_blocks == tuple((index, first.blocks[index].id) for index in (0, 1))
    second = tokens(range(10))
    scheduler.add(second)
    decoding, chunk = step(scheduler).chunks
    assert decoding.save_blocks == ()
    assert chunk.load_block_ids == tuple(block.id for block in first.blocks[:2])
    assert chunk.save_blocks == ()
    assert second.cached_tokens == 8


def test_twins_of_one_step_end_up_sharing_one_block():
    scheduler = make()
    twins = [tokens(range(10)), tokens(range(10))]
    for one in twins:
        scheduler.add(one)
    plan = step(scheduler)
    assert [len(chunk.save_blocks) for chunk in plan.chunks] == [2, 2]
    assert twins[0].blocks[:2] == twins[1].blocks[:2]
    assert scheduler.pool.active == 4
    scheduler.pool.check_invariants()


def test_hits_from_scheduled_count_within_the_step():
    scheduler = make(hits_from="scheduled")
    scheduler.add(tokens(range(10)))
    scheduler.add(tokens(range(10)))
    assert shape(step(scheduler)) == [(0, 10, True), (8, 2, True)]


def test_ending_within_the_step_is_ignored_by_its_completion():
    scheduler = make()
    one = tokens(range(10))
    scheduler.add(one)
    plan = scheduler.schedule()
    scheduler.remove(one)
    scheduler.remove(one)
    assert scheduler.pool.active == 0
    scheduler.complete(plan, [1])
    assert one.length == 10
    assert scheduler.pool.cached == 0
    assert scheduler.schedule() is None


def test_hashes_alone_are_enough():
    class Counted(SequenceContent):
        """Prompt blocks by their hashes; generated ones are unlike any other."""

        def __init__(self, hashes):
            self.root = 0
            self.hashes = list(hashes)

        def ensure_hashes(self, blocks):
            self.hashes += [id(self) + at for at in range(len(self.hashes), blocks)]

        def append_token(self, token):
            pass

    scheduler = make(hits_from="scheduled")
    first = EngineSequence(Counted([11, 12, 13]), 14, 6)
    scheduler.add(first)
    scheduler.add(EngineSequence(Counted([11, 12, 77]), 13, 6))
    assert shape(step(scheduler, token=0)) == [(0, 14, True), (8, 5, True)]
    for _ in range(4):
        step(scheduler, token=0)
    assert first.length == 19
    assert scheduler.pool.cached == 6


def test_the_pool_evicts_the_oldest_chain_from_its_tail():
    pool = BlockPool(4, 4)
    chains = {}
    for name, root in (("old", 100), ("new", 200)):
        blocks, parent, above = pool.allocate(2), 0, None
        for at, block in enumerate(blocks):
            assert pool.register(block, above, parent, root + at) is block
            parent, above = root + at, block
        chains[name] = blocks
    pool.release(chains["old"])
    pool.release(chains["new"])
    pool.take_events()
    pool.allocate(1)
    assert [event.hashes for event in pool.take_events()] == [(101,)]
    pool.allocate(2)
    assert [event.hashes for event in pool.take_events()] == [(100, 201)]
    assert pool.match([200, 201]) == chains["new"][:1]
    pool.check_invariants()


def test_check_finds_a_lost_block():
    pool = BlockPool(4, 4)
    pool.allocate(1)[0].ref_count = 0
    with pytest.raises(AssertionError, match="lost free block"):
        pool.check_invariants()


def test_a_twin_s_block_is_saved_though_its_content_is_held():
    """What is held when the step is planned may be evicted by the rest of the plan."""
    scheduler = make(budget=14)
    first, second = tokens(range(10)), tokens(range(10))
    scheduler.add(first)
    scheduler.add(second)
    assert shape(step(scheduler)) == [(0, 10, True), (0, 4, False)]
    plan = scheduler.schedule()
    assert shape(plan) == [(10, 1, True), (4, 6, True)]
    assert plan.chunks[1].save_blocks == ((1, second.blocks[1].id),)
