"""BatchedEngine: delivery, ends, cancellation, events, failures; with the mock's runner."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, WorkerFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import BlocksCleared, BlocksStored
from dynamo.inference.mock.runner import MockRunner

CONTEXT = Context("r")


async def ask(engine, request, reply):
    await engine.generate(request, CONTEXT, reply)
    return reply


async def test_a_request_is_answered_in_order(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    reply = await ask(engine, make_request(range(40), max_tokens=7), heard())
    assert reply.started.prompt_tokens == 40
    assert len(reply.ids) == 7
    assert all(100 <= token < 900 for token in reply.ids)
    assert (reply.end.reason, reply.end.completion_tokens) == ("length", 7)
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_the_second_prompt_hits_the_first(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    first = await ask(engine, make_request(range(64), max_tokens=1), heard())
    again = await ask(engine, make_request(range(64), max_tokens=1), heard())
    other = await ask(engine, make_request(range(64), max_tokens=1, salt="other"), heard())
    assert [one.started.cached_tokens for one in (first, again, other)] == [0, 48, 0]
    assert engine.counters.cached_tokens == 48
    await engine.stop()


async def test_a_turn_hits_prompt_and_answer_of_the_turn_before(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    first = await ask(engine, make_request(range(20), max_tokens=40), heard())
    turn = [*range(20), *first.ids, 5, 6, 7]
    second = await ask(engine, make_request(turn, max_tokens=1), heard())
    assert second.started.cached_tokens == 48
    await engine.stop()


async def test_one_token_of_a_prompt_is_always_computed(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    await ask(engine, make_request(range(32), max_tokens=1), heard())
    again = await ask(engine, make_request(range(32), max_tokens=1), heard())
    assert again.started.cached_tokens == 16
    await engine.stop()


async def test_identical_prompts_of_one_instant_share_their_blocks(
    make_engine, make_request, heard
):
    engine = make_engine()
    await engine.start()
    request = make_request(range(65), max_tokens=3)
    replies = await run_all(*(ask(engine, request, heard()) for _ in range(3)))
    assert sorted(one.started.cached_tokens for one in replies) == [0, 64, 64]
    assert len({tuple(one.ids) for one in replies}) == 1
    await engine.stop()


async def test_without_prefix_caching_nothing_is_hit_or_told(make_engine, make_request, heard):
    engine = make_engine(prefix_caching=False)
    told = []
    engine.on_kv_events(told.extend)
    await engine.start()
    for _ in range(2):
        reply = await ask(engine, make_request(range(64), max_tokens=1), heard())
        assert reply.started.cached_tokens == 0
    assert not told
    await engine.stop()


async def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    make_engine, make_request, heard
):
    engine = make_engine()
    await engine.start()
    whole = await ask(engine, make_request(range(10), max_tokens=30), heard())
    other = make_engine(block_size=4)
    await other.start()
    ids = [*range(10), *whole.ids[:13]]
    rest = await ask(other, make_request(ids, resumed=13, max_tokens=17), heard())
    assert whole.ids == whole.ids[:13] + rest.ids
    await engine.stop()
    await other.stop()


async def test_batch_chunks_and_preemption_change_no_token(make_engine, make_request, heard):
    roomy = make_engine()
    tight = make_engine(num_blocks=14, max_num_batched_tokens=24, max_num_seqs=4)
    await roomy.start()
    await tight.start()
    requests = [make_request(range(n, n + 30 + n), max_tokens=60) for n in range(8)]
    alone = [(await ask(roomy, request, heard())).ids for request in requests]
    together = await run_all(*(ask(tight, request, heard()) for request in requests))
    assert [reply.ids for reply in together] == alone
    assert tight.scheduler.preemptions > 0
    await roomy.stop()
    await tight.stop()


async def test_stop_tokens_end_and_are_not_sent(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    free = await ask(engine, make_request(range(9), max_tokens=20), heard())
    stop = free.ids[5]
    ended = await ask(
        engine, make_request(range(9), max_tokens=20, stop_token_ids=(stop,)), heard()
    )
    assert ended.ids == free.ids[:5]
    assert (ended.end.reason, ended.end.stop_token) == ("stop", stop)
    assert ended.end.completion_tokens == 5
    longer = make_request(range(9), max_tokens=20, stop_token_ids=(stop,), min_tokens=6)
    assert len((await ask(engine, longer, heard())).ids) > 5
    await engine.stop()


async def test_a_stop_token_at_once_still_begins(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    first = (await ask(engine, make_request(range(9), max_tokens=1), heard())).ids[0]
    ended = await ask(engine, make_request(range(9), stop_token_ids=(first,)), heard())
    assert ended.ids == []
    assert ended.end.reason == "stop"
    await engine.stop()


async def test_enough_ends_without_finish(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    reply = await ask(engine, make_request(range(9), max_tokens=100), heard(enough=3))
    assert len(reply.ids) == 3
    assert reply.end is None
    assert engine.report_load().running == 0
    await engine.stop()


async def test_the_context_ends_an_answer(make_engine, make_request, heard):
    engine = make_engine(context_tokens=50)
    await engine.start()
    reply = await ask(engine, make_request(range(45), max_tokens=100), heard())
    assert (reply.end.reason, len(reply.ids)) == ("length", 5)
    await engine.stop()


async def test_what_can_never_run_is_refused_at_once(make_engine, make_request, heard):
    engine = make_engine(num_blocks=3)
    info = await engine.start()
    assert info.context_tokens == 48
    with pytest.raises(ContextLengthExceeded):
        await ask(engine, make_request(range(48), max_tokens=1), heard())
    for wrong in (make_request([]), make_request([1000]), make_request([1], max_tokens=0)):
        with pytest.raises(InvalidRequest):
            await ask(engine, wrong, heard())
    assert engine.report_load().waiting == 0
    await engine.stop()


async def test_cancelling_frees_at_once(make_engine, make_request, heard):
    engine = make_engine(num_blocks=6)
    await engine.start()
    reply = heard()
    async with BackgroundTasks() as tasks:
        running = tasks.start(ask(engine, make_request(range(40), max_tokens=50), reply))
        waiting = tasks.start(ask(engine, make_request(range(80), max_tokens=2), heard()))
        await reply.first.wait()
        assert engine.report_load().waiting == 1
        waiting.cancel()
        running.cancel()
        await asyncio.wait([running, waiting])
    load = engine.report_load()
    assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)
    assert len((await ask(engine, make_request(range(9), max_tokens=2), heard())).ids) == 2
    await engine.stop()


async def test_events_are_told_once_a_step_and_rebuild_what_is_held(
    make_engine, make_request, heard
):
    engine = make_engine(num_blocks=8)
    told = []
    engine.on_kv_events(told.append)
    await engine.start()
    for start in (0, 200, 400):
        await ask(engine, make_request(range(start, start + 40), max_tokens=20), heard())
    held = set()
    for event in [event for batch in told for event in batch]:
        change = held.update if isinstance(event, BlocksStored) else held.difference_update
        change(event.hashes)
    assert held == {one for event in engine.snapshot_kv_events() for one in event.hashes}
    assert told[0] == [engine_event(told[0])]
    assert engine.clear_prefix_cache() == len(held)
    assert told[-1] == [BlocksCleared()]
    assert not engine.snapshot_kv_events()
    await engine.stop()


def engine_event(batch):
    """The only event of a batch: two full blocks of the first prompt, under the root."""
    (event,) = batch
    assert isinstance(event, BlocksStored)
    assert (event.parent, len(event.hashes)) == (0, 2)
    return event


async def test_logprobs_come_when_asked_for(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    asked = make_request(range(9), max_tokens=4, top_logprobs=3)
    plain, extra = await run_all(
        ask(engine, make_request(range(9), max_tokens=4), heard()), ask(engine, asked, heard())
    )
    assert plain.ids == extra.ids
    assert plain.extras == [None] * 4
    for token, entry in zip(extra.ids, extra.extras, strict=True):
        assert entry.token == token
        assert entry.top[0] == (token, entry.logprob)
        assert len({one for one, _ in entry.top}) == 3
        assert list(entry.top) == sorted(entry.top, key=lambda one: -one[1])
    await engine.stop()


async def test_a_failing_step_fails_its_requests_and_no_others(
    make_engine, make_request, heard, monkeypatch
):
    engine = make_engine()
    await engine.start()

    async def broken(self, plan):
        raise ArithmeticError("no such number")

    with monkeypatch.context() as patch:
        patch.setattr(MockRunner, "step", broken)
        with pytest.raises(WorkerFailed, match="no such number"):
            await ask(engine, make_request(range(9)), heard())
    assert engine.report_load().active_blocks == 0
    assert len((await ask(engine, make_request(range(9), max_tokens=2), heard())).ids) == 2
    await engine.stop()


async def test_a_failing_reply_fails_only_itself(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()

    class Bad(heard):
        def tokens(self, ids, logprobs=None):
            raise ZeroDivisionError

    request = make_request(range(9), max_tokens=5)
    async with BackgroundTasks() as tasks:
        bad = tasks.start(ask(engine, request, Bad()))
        good = await ask(engine, request, heard())
        with pytest.raises(ZeroDivisionError):
            await bad
    assert len(good.ids) == 5
    await engine.stop()


async def test_a_reply_that_fails_to_begin_fails_only_itself(make_engine, make_request, heard):
    """Also of a request that failed elsewhere, which is told before the step."""
    engine = make_engine()
    await engine.start()

    class Bad(heard):
        def begin(self, started):
            raise ZeroDivisionError

    request = make_request(range(9), max_tokens=5)
    async with BackgroundTasks() as tasks:
        good = tasks.start(ask(engine, request, heard()))
        for attempt in (0, 1):
            with pytest.raises(ZeroDivisionError):
                await engine.generate(request, Context("r", attempt=attempt), Bad())
        assert len((await good).ids) == 5
    assert engine.failure is None
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_stopping_fails_what_is_in_flight(make_engine, make_request, heard):
    engine = make_engine()
    with pytest.raises(WorkerFailed):
        await ask(engine, make_request(range(9)), heard())
    await engine.start()
    reply = heard()
    async with BackgroundTasks() as tasks:
        running = tasks.start(ask(engine, make_request(range(9), max_tokens=1000), reply))
        await reply.first.wait()
        await engine.stop()
        with pytest.raises(WorkerFailed):
            await running
    with pytest.raises(WorkerFailed):
        await ask(engine, make_request(range(9)), heard())


async def test_a_higher_priority_is_admitted_first(make_engine, make_request, heard):
    engine = make_engine(max_num_seqs=1)
    await engine.start()
    order = []

    async def one(name, priority):
        await ask(engine, make_request(range(9), max_tokens=2, priority=priority), heard())
        order.append(name)

    await run_all(one("first", 0), one("second", 0), one("urgent", 5))
    assert order == ["urgent", "first", "second"]
    await engine.stop()


async def test_a_dead_loop_fails_everybody_and_says_so(
    make_engine, make_request, heard, monkeypatch
):
    engine = make_engine()
    await engine.start()
    told = []
    engine.on_failure(lambda: told.append(True))

    def broken(plan, tokens):
        raise ArithmeticError

    monkeypatch.setattr(engine.scheduler, "complete", broken)
    errors = []
    for _ in range(3):
        with pytest.raises(WorkerFailed) as caught:
            await ask(engine, make_request(range(9)), heard())
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3  # a shared one would gather tracebacks
    assert told == [True]
    assert engine.failure is not None
    await engine.stop()
