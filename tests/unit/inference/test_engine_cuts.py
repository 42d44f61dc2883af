"""BatchedEngine where requests are cut: resumed elsewhere, cancelled anywhere, dumped midway."""

from __future__ import annotations

import asyncio

from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import BlocksRemoved, BlocksStored


async def ask(engine, request, reply):
    await engine.generate(request, Context("r"), reply)
    return reply


def apply(view, events):
    """What a listener makes of events."""
    for event in events:
        if isinstance(event, BlocksStored):
            view.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            view.difference_update(event.hashes)
        else:
            view.clear()


async def test_wherever_a_request_is_cut_the_rest_is_the_same(make_engine, make_request, heard):
    """Tokens, logprobs and the end; also while others share the batch and force preemption."""
    engine = make_engine(num_blocks=16, block_size=4, max_num_batched_tokens=12)
    await engine.start()
    free = await ask(engine, make_request(range(10), max_tokens=20), heard())
    limits = {"top_logprobs": 2, "stop_token_ids": (free.ids[15],)}
    whole = await ask(engine, make_request(range(10), max_tokens=20, **limits), heard())
    assert whole.ids == free.ids[:15]

    async def rest(cut):
        ids = [*range(10), *whole.ids[:cut]]
        request = make_request(ids, resumed=cut, max_tokens=20 - cut, salt=str(cut), **limits)
        reply = await ask(engine, request, heard())
        assert (reply.ids, reply.extras) == (whole.ids[cut:], whole.extras[cut:])
        assert (reply.end.reason, reply.end.stop_token) == ("stop", free.ids[15])
        assert reply.end.completion_tokens == 15 - cut

    await run_all(*(rest(cut) for cut in range(16)))
    assert engine.scheduler.preemptions > 0
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_cancelled_anywhere_nothing_is_lost(make_engine, make_request, heard):
    """While waiting, preempted, computed, and with the cache cleared: blocks and events agree."""
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    await engine.start()
    held = set()

    engine.on_kv_events(lambda events: apply(held, events))
    async with BackgroundTasks() as tasks:
        running = [
            tasks.start(ask(engine, make_request(range(n, n + 14), max_tokens=25), heard()))
            for n in range(30)
        ]
        for turn, task in enumerate(running):
            await asyncio.sleep(0)
            if turn % 3 == 0:
                task.cancel()
            if turn % 7 == 0:
                engine.clear_prefix_cache()
            engine.scheduler.pool.check_invariants()
        for turn, task in enumerate(running):
            if turn % 3:
                assert len((await task).ids) == 25
    assert engine.scheduler.preemptions > 0
    assert engine.report_load().active_blocks == 0
    assert {h for event in engine.snapshot_kv_events() for h in event.hashes} == held
    await engine.stop()


async def test_a_dump_and_what_follows_it_come_to_what_is_held(make_engine, make_request, heard):
    """Wherever the dump falls: also within a step, whose events were not told yet."""
    engine = make_engine(num_blocks=12, block_size=4, max_num_batched_tokens=8, max_num_seqs=3)
    await engine.start()
    views = []

    engine.on_kv_events(lambda events: [apply(view, events) for view in views])
    async with BackgroundTasks() as tasks:
        running = [
            tasks.start(ask(engine, make_request(range(n, n + 14), max_tokens=9), heard()))
            for n in range(12)
        ]
        while not all(task.done() for task in running):
            views.append(set())
            apply(views[-1], engine.snapshot_kv_events())
            if len(views) % 9 == 0:
                engine.clear_prefix_cache()
            await asyncio.sleep(0)
    assert len(views) > 50
    held = {block for event in engine.snapshot_kv_events() for block in event.hashes}
    assert all(view == held for view in views)
    await engine.stop()
