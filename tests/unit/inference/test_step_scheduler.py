"""The content of a step: budget, chunks, admission, preemption, loaded and saved blocks."""

from __future__ import annotations

from array import array

import pytest
from tests.support.invariants import check_pool

from dynamo.core.values import EngineInfo
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import EngineSequence, SequenceContent, TokenContent
from dynamo.inference.step_scheduler import StepScheduler


def make_scheduler(blocks=100, budget=64, seqs=8, context=400, hits_from="computed"):
    pool = BlockPool(blocks, 4)
    limits = EngineInfo("test", pool.block_tokens, pool.num_blocks, context, seqs, budget)
    return StepScheduler(pool, limits, hits_from=hits_from)


def make_sequence(ids, max_tokens=10, priority=0):
    content = TokenContent(array("I", ids).tobytes(), 4)
    return EngineSequence(content, len(ids), max_tokens, priority=priority)


def step(scheduler, token=1):
    plan = scheduler.schedule()
    scheduler.complete(plan, [token] * sum(chunk.samples for chunk in plan.chunks))
    return plan


def chunk_shapes(plan):
    return [(chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks]


def test_a_long_prompt_is_chunked_and_others_share_the_budget():
    scheduler = make_scheduler(budget=10)
    scheduler.add(make_sequence(range(25)))
    scheduler.add(make_sequence(range(100, 108)))
    assert chunk_shapes(step(scheduler)) == [(0, 10, False)]
    assert chunk_shapes(step(scheduler)) == [(10, 10, False)]
    assert chunk_shapes(step(scheduler)) == [(20, 5, True), (0, 5, False)]
    plan = step(scheduler)
    assert chunk_shapes(plan) == [(25, 1, True), (5, 3, True)]
    assert (plan.new_tokens, plan.decode_seqs, plan.decode_context) == (3, 1, 26)


def test_a_plan_tells_whether_the_engine_was_idle():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    sequence = make_sequence(range(5))
    scheduler.add(sequence)
    assert not step(scheduler).back_to_back
    assert step(scheduler).back_to_back
    scheduler.remove(sequence)
    assert scheduler.schedule() is None
    scheduler.add(make_sequence(range(5)))
    assert not step(scheduler).back_to_back


def test_batch_slots_are_limited_and_go_by_priority():
    scheduler = make_scheduler(seqs=2)
    low, high, later = (
        make_sequence(range(3)),
        make_sequence(range(9, 12), priority=1),
        make_sequence(range(6)),
    )
    for sequence in (low, later, high):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in step(scheduler).chunks] == [high, low]
    scheduler.remove(high)
    assert [chunk.sequence for chunk in step(scheduler).chunks] == [low, later]


def test_answers_that_may_fill_the_memory_run_together():
    """Blocks are taken as answers grow, not for their largest length."""
    scheduler = make_scheduler(blocks=100, context=400)
    sequences = [make_sequence(range(start, start + 9), max_tokens=391) for start in range(8)]
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    plan = step(scheduler)
    assert {chunk.sequence for chunk in plan.chunks} == {*sequences}


def test_the_last_sequence_is_preempted_and_resumes_from_the_cache():
    scheduler = make_scheduler(blocks=6)
    first, last = make_sequence(range(11)), make_sequence(range(50, 61))
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


def test_full_blocks_are_saved_and_hits_are_loaded():
    scheduler = make_scheduler()
    first = make_sequence(range(10))
    scheduler.add(first)
    chunk = step(scheduler).chunks[0]
    assert chunk.save_blocks == tuple((index, first.blocks[index].id) for index in (0, 1))
    second = make_sequence(range(10))
    scheduler.add(second)
    decoding, chunk = step(scheduler).chunks
    assert decoding.save_blocks == ()
    assert chunk.load_block_ids == tuple(block.id for block in first.blocks[:2])
    assert chunk.save_blocks == ()
    assert second.cached_tokens == 8


def test_equal_sequences_of_one_step_end_up_with_shared_blocks():
    scheduler = make_scheduler()
    sequences = [make_sequence(range(10)), make_sequence(range(10))]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = step(scheduler)
    assert [len(chunk.save_blocks) for chunk in plan.chunks] == [2, 2]
    assert sequences[0].blocks[:2] == sequences[1].blocks[:2]
    assert scheduler.pool.active == 4
    check_pool(scheduler.pool)


def test_hits_from_scheduled_count_within_the_step():
    scheduler = make_scheduler(hits_from="scheduled")
    scheduler.add(make_sequence(range(10)))
    scheduler.add(make_sequence(range(10)))
    assert chunk_shapes(step(scheduler)) == [(0, 10, True), (8, 2, True)]


def test_the_result_of_a_sequence_that_ended_in_the_step_is_ignored():
    scheduler = make_scheduler()
    sequence = make_sequence(range(10))
    scheduler.add(sequence)
    plan = scheduler.schedule()
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    assert scheduler.pool.active == 0
    scheduler.complete(plan, [1])
    assert sequence.length == 10
    assert scheduler.pool.cached == 0
    assert scheduler.schedule() is None


class HashOnlyContent(SequenceContent):
    """Prompt blocks are given by their hashes. Generated blocks have unique hashes."""

    def __init__(self, hashes):
        self.root = 0
        self.hashes = list(hashes)

    def ensure_hashes(self, blocks):
        self.hashes += [id(self) + index for index in range(len(self.hashes), blocks)]

    def append_token(self, token):
        pass


def test_a_content_of_hashes_is_enough():
    scheduler = make_scheduler(hits_from="scheduled")
    first = EngineSequence(HashOnlyContent([11, 12, 13]), 14, 6)
    scheduler.add(first)
    scheduler.add(EngineSequence(HashOnlyContent([11, 12, 77]), 13, 6))
    assert chunk_shapes(step(scheduler, token=0)) == [(0, 14, True), (8, 5, True)]
    for _ in range(4):
        step(scheduler, token=0)
    assert first.length == 19
    assert scheduler.pool.cached == 6


def test_the_pool_evicts_the_oldest_chain_from_its_tail():
    pool = BlockPool(4, 4)
    chains = {}
    for name, root in (("old", 100), ("new", 200)):
        chains[name] = pool.allocate(2)
        pool.register_chain(HashOnlyContent([root, root + 1]), chains[name], 0, 2)
    pool.release(chains["old"])
    pool.release(chains["new"])
    pool.take_events()
    pool.allocate(1)
    assert [event.hashes for event in pool.take_events()] == [(101,)]
    pool.allocate(2)
    assert [event.hashes for event in pool.take_events()] == [(100, 201)]
    assert pool.match([200, 201]) == chains["new"][:1]
    check_pool(pool)


def test_check_pool_finds_a_lost_block():
    pool = BlockPool(4, 4)
    pool.allocate(1)[0].ref_count = 0
    with pytest.raises(AssertionError, match="lost free block"):
        check_pool(pool)


def test_a_block_is_saved_although_its_content_is_cached():
    """A block that is cached when the step is planned may be evicted by the rest of the plan."""
    scheduler = make_scheduler(budget=14)
    first, second = make_sequence(range(10)), make_sequence(range(10))
    scheduler.add(first)
    scheduler.add(second)
    assert chunk_shapes(step(scheduler)) == [(0, 10, True), (0, 4, False)]
    plan = scheduler.schedule()
    assert chunk_shapes(plan) == [(10, 1, True), (4, 6, True)]
    assert plan.chunks[1].save_blocks == ((1, second.blocks[1].id),)
