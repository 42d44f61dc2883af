"""BatchedEngine with interrupted requests: resumed elsewhere, cancelled, and dumped midway."""

from __future__ import annotations

import asyncio

from tests.support.invariants import check_pool
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import BlocksRemoved, BlocksStored


async def generate(engine, request, reply=None):
    reply = reply or RecordingReply()
    await engine.generate(request, Context("r"), reply)
    return reply


def apply(view, events):
    """Apply events to `view`, a set of block hashes, as a listener does."""
    for event in events:
        if isinstance(event, BlocksStored):
            view.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            view.difference_update(event.hashes)
        else:
            view.clear()


async def test_a_resumed_request_generates_the_same_rest_from_any_cut(make_engine, make_request):
    """Compare tokens, logprobs and the end. Other requests share the batch and force preemption."""
    engine = make_engine(num_blocks=16, block_size=4, max_num_batched_tokens=12)
    await engine.start()
    unlimited = await generate(engine, make_request(range(10), max_tokens=20))
    limits = {"top_logprobs": 2, "stop_token_ids": (unlimited.ids[15],)}
    whole = await generate(engine, make_request(range(10), max_tokens=20, **limits))
    assert whole.ids == unlimited.ids[:15]

    async def check_rest(cut):
        ids = [*range(10), *whole.ids[:cut]]
        request = make_request(ids, resumed=cut, max_tokens=20 - cut, salt=str(cut), **limits)
        reply = await generate(engine, request)
        assert (reply.ids, reply.extras) == (whole.ids[cut:], whole.extras[cut:])
        assert (reply.end.reason, reply.end.stop_token) == ("stop", unlimited.ids[15])
        assert reply.end.completion_tokens == 16 - cut, "with the stop token"

    await run_all(*(check_rest(cut) for cut in range(16)))
    assert engine.scheduler.preemptions > 0
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_cancellation_at_any_moment_loses_no_block_and_no_event(make_engine, make_request):
    """Blocks and events must agree for waiting, preempted and computed requests and a cleared
    cache."""
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    await engine.start()
    cached = set()

    engine.on_kv_events(lambda events: apply(cached, events))
    async with BackgroundTasks() as tasks:
        running = [
            tasks.start(generate(engine, make_request(range(n, n + 14), max_tokens=25)))
            for n in range(30)
        ]
        for number, task in enumerate(running):
            await asyncio.sleep(0)
            if number % 3 == 0:
                task.cancel()
            if number % 7 == 0:
                engine.clear_prefix_cache()
            check_pool(engine.scheduler.pool)
        for number, task in enumerate(running):
            if number % 3:
                assert len((await task).ids) == 25
    assert engine.scheduler.preemptions > 0
    assert engine.report_load().active_blocks == 0
    assert {h for event in engine.snapshot_kv_events() for h in event.hashes} == cached
    await engine.stop()


async def test_a_dump_and_later_events_rebuild_the_cache(make_engine, make_request):
    """The dump may be taken within a step, whose events are not published yet."""
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    await engine.start()
    views = []

    engine.on_kv_events(lambda events: [apply(view, events) for view in views])
    async with BackgroundTasks() as tasks:
        running = [
            tasks.start(generate(engine, make_request(range(n, n + 14), max_tokens=9)))
            for n in range(12)
        ]
        while not all(task.done() for task in running):
            views.append(set())
            apply(views[-1], engine.snapshot_kv_events())
            if len(views) % 9 == 0:
                engine.clear_prefix_cache()
            await asyncio.sleep(0)
    assert len(views) > 50
    cached = {block for event in engine.snapshot_kv_events() for block in event.hashes}
    assert all(view == cached for view in views)
    await engine.stop()
