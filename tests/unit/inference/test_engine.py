"""BatchedEngine with the mock runner: delivery, ends, cancellation, events and failures."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, WorkerFailed
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import BlocksCleared, BlocksStored
from dynamo.inference.mock.runner import MockRunner

CONTEXT = Context("r")


async def generate(engine, request, reply=None):
    reply = reply or RecordingReply()
    await engine.generate(request, CONTEXT, reply)
    return reply


async def test_a_request_is_answered_in_order(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    reply = await generate(engine, make_request(range(40), max_tokens=7))
    assert reply.started.prompt_tokens == 40
    assert len(reply.ids) == 7
    assert all(100 <= token < 900 for token in reply.ids)
    assert (reply.end.reason, reply.end.completion_tokens) == ("length", 7)
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_an_equal_prompt_hits_the_prefix_cache(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    first = await generate(engine, make_request(range(64), max_tokens=1))
    second = await generate(engine, make_request(range(64), max_tokens=1))
    other = await generate(engine, make_request(range(64), max_tokens=1, salt="other"))
    assert [reply.started.cached_tokens for reply in (first, second, other)] == [0, 48, 0]
    assert engine.counters.cached_tokens == 48
    await engine.stop()


async def test_the_times_of_an_answer_tell_how_many_were_decoded_with_it(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    requests = [make_request(range(n, n + 40), max_tokens=n) for n in (21, 41, 41)]
    replies = await asyncio.gather(*(generate(engine, request) for request in requests))
    alone = await generate(engine, make_request(range(40), max_tokens=9))
    beside = [reply.times.decode_beside for reply in (*replies, alone)]
    assert beside == [2.0, 1.5, 1.5, 0.0]
    await engine.stop()


async def test_a_turn_hits_prompt_and_answer_of_the_previous_turn(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    first = await generate(engine, make_request(range(20), max_tokens=40))
    turn = [*range(20), *first.ids, 5, 6, 7]
    second = await generate(engine, make_request(turn, max_tokens=1))
    assert second.started.cached_tokens == 48
    await engine.stop()


async def test_the_last_token_of_a_prompt_is_always_computed(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    await generate(engine, make_request(range(32), max_tokens=1))
    second = await generate(engine, make_request(range(32), max_tokens=1))
    assert second.started.cached_tokens == 16
    await engine.stop()


async def test_equal_prompts_that_arrive_together_share_blocks(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    request = make_request(range(65), max_tokens=3)
    replies = await run_all(*(generate(engine, request) for _ in range(3)))
    assert sorted(reply.started.cached_tokens for reply in replies) == [0, 64, 64]
    assert len({tuple(reply.ids) for reply in replies}) == 1
    await engine.stop()


async def test_without_prefix_caching_there_are_no_hits_and_no_events(make_engine, make_request):
    engine = make_engine(prefix_caching=False)
    events = []
    engine.on_kv_events(events.extend)
    await engine.start()
    for _ in range(2):
        reply = await generate(engine, make_request(range(64), max_tokens=1))
        assert reply.started.cached_tokens == 0
    assert not events
    await engine.stop()


async def test_a_resumed_request_generates_the_same_rest(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    whole = await generate(engine, make_request(range(10), max_tokens=30))
    other = make_engine(block_size=4)
    await other.start()
    ids = [*range(10), *whole.ids[:13]]
    rest = await generate(other, make_request(ids, resumed=13, max_tokens=17))
    assert whole.ids == whole.ids[:13] + rest.ids
    await engine.stop()
    await other.stop()


async def test_batching_chunks_and_preemption_change_no_token(make_engine, make_request):
    roomy = make_engine()
    tight = make_engine(num_blocks=14, max_num_batched_tokens=24, max_num_seqs=4)
    await roomy.start()
    await tight.start()
    requests = [make_request(range(n, n + 30 + n), max_tokens=60) for n in range(8)]
    alone = [(await generate(roomy, request)).ids for request in requests]
    together = await run_all(*(generate(tight, request) for request in requests))
    assert [reply.ids for reply in together] == alone
    assert tight.scheduler.preemptions > 0
    await roomy.stop()
    await tight.stop()


async def test_a_stop_token_ends_the_answer_and_is_not_sent(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    unlimited = await generate(engine, make_request(range(9), max_tokens=20))
    stop = unlimited.ids[5]
    ended = await generate(engine, make_request(range(9), max_tokens=20, stop_token_ids=(stop,)))
    assert ended.ids == unlimited.ids[:5]
    assert (ended.end.reason, ended.end.stop_token) == ("stop", stop)
    assert ended.end.completion_tokens == 6, "the stop token is generated, too"
    for limit, reason in ((6, "stop"), (5, "length")):
        request = make_request(range(9), max_tokens=limit, stop_token_ids=(stop,))
        end = (await generate(engine, request)).end
        assert (end.reason, end.completion_tokens) == (reason, limit), "max_tokens counts it, too"
    longer = make_request(range(9), max_tokens=20, stop_token_ids=(stop,), min_tokens=6)
    assert len((await generate(engine, longer)).ids) > 5
    await engine.stop()


async def test_a_stop_token_at_once_still_begins_the_reply(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    first = (await generate(engine, make_request(range(9), max_tokens=1))).ids[0]
    ended = await generate(engine, make_request(range(9), stop_token_ids=(first,)))
    assert ended.ids == []
    assert ended.end.reason == "stop"
    await engine.stop()


async def test_a_reply_that_has_enough_gets_no_finish(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    reply = await generate(engine, make_request(range(9), max_tokens=100), RecordingReply(limit=3))
    assert len(reply.ids) == 3
    assert reply.end is None
    assert engine.report_load().running == 0
    await engine.stop()


async def test_the_context_limit_ends_an_answer(make_engine, make_request):
    engine = make_engine(context_tokens=50)
    await engine.start()
    reply = await generate(engine, make_request(range(45), max_tokens=100))
    assert (reply.end.reason, len(reply.ids)) == ("length", 5)
    await engine.stop()


async def test_a_request_that_can_never_run_is_refused_at_once(make_engine, make_request):
    engine = make_engine(num_blocks=3)
    info = await engine.start()
    assert info.context_tokens == 48
    with pytest.raises(ContextLengthExceeded):
        await generate(engine, make_request(range(48), max_tokens=1))
    for wrong in (make_request([]), make_request([1000]), make_request([1], max_tokens=0)):
        with pytest.raises(InvalidRequest):
            await generate(engine, wrong)
    assert engine.report_load().waiting == 0
    await engine.stop()


async def test_cancellation_frees_blocks_at_once(make_engine, make_request):
    engine = make_engine(num_blocks=6)
    await engine.start()
    reply = RecordingReply()
    async with BackgroundTasks() as tasks:
        running = tasks.start(generate(engine, make_request(range(40), max_tokens=50), reply))
        waiting = tasks.start(generate(engine, make_request(range(80), max_tokens=2)))
        await reply.first.wait()
        assert engine.report_load().waiting == 1
        waiting.cancel()
        running.cancel()
        await asyncio.wait([running, waiting])
    load = engine.report_load()
    assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)
    assert len((await generate(engine, make_request(range(9), max_tokens=2))).ids) == 2
    await engine.stop()


async def test_events_are_published_once_a_step_and_rebuild_the_cache(make_engine, make_request):
    engine = make_engine(num_blocks=8)
    batches = []
    engine.on_kv_events(batches.append)
    await engine.start()
    for start in (0, 200, 400):
        await generate(engine, make_request(range(start, start + 40), max_tokens=20))
    cached = set()
    for event in [event for batch in batches for event in batch]:
        change = cached.update if isinstance(event, BlocksStored) else cached.difference_update
        change(event.hashes)
    assert cached == {
        block_hash for event in engine.snapshot_kv_events() for block_hash in event.hashes
    }
    check_first_batch(batches[0])
    assert engine.clear_prefix_cache() == len(cached)
    assert batches[-1] == [BlocksCleared()]
    assert not engine.snapshot_kv_events()
    await engine.stop()


def check_first_batch(batch):
    """Check the only event of the batch: two full blocks of the first prompt, below the root."""
    (event,) = batch
    assert isinstance(event, BlocksStored)
    assert (event.parent, len(event.hashes)) == (0, 2)


async def test_logprobs_are_sent_on_request(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    with_logprobs = make_request(range(9), max_tokens=4, top_logprobs=3)
    plain, extra = await run_all(
        generate(engine, make_request(range(9), max_tokens=4)), generate(engine, with_logprobs)
    )
    assert plain.ids == extra.ids
    assert plain.extras == [None] * 4
    for token, entry in zip(extra.ids, extra.extras, strict=True):
        assert entry.token == token
        assert entry.top[0] == (token, entry.logprob)
        assert len({item for item, _ in entry.top}) == 3
        assert list(entry.top) == sorted(entry.top, key=lambda item: -item[1])
    await engine.stop()


async def test_a_failing_step_fails_its_requests_and_no_others(
    make_engine, make_request, monkeypatch
):
    engine = make_engine()
    await engine.start()

    async def broken(self, plan):
        raise ArithmeticError("no such number")

    with monkeypatch.context() as patch:
        patch.setattr(MockRunner, "step", broken)
        with pytest.raises(WorkerFailed, match="no such number"):
            await generate(engine, make_request(range(9)))
    assert engine.report_load().active_blocks == 0
    assert len((await generate(engine, make_request(range(9), max_tokens=2))).ids) == 2
    await engine.stop()


async def test_a_failing_reply_fails_only_itself(make_engine, make_request):
    engine = make_engine()
    await engine.start()

    class FailingReply(RecordingReply):
        def tokens(self, ids, logprobs=None):
            raise ZeroDivisionError

    request = make_request(range(9), max_tokens=5)
    async with BackgroundTasks() as tasks:
        bad = tasks.start(generate(engine, request, FailingReply()))
        good = await generate(engine, request)
        with pytest.raises(ZeroDivisionError):
            await bad
    assert len(good.ids) == 5
    await engine.stop()


async def test_a_reply_that_fails_to_begin_fails_only_itself(make_engine, make_request):
    """Also for a retried request, whose reply begins before the step is computed."""
    engine = make_engine()
    await engine.start()

    class FailingReply(RecordingReply):
        def begin(self, started):
            raise ZeroDivisionError

    request = make_request(range(9), max_tokens=5)
    async with BackgroundTasks() as tasks:
        good = tasks.start(generate(engine, request))
        for attempt in (0, 1):
            with pytest.raises(ZeroDivisionError):
                await engine.generate(request, Context("r", attempt=attempt), FailingReply())
        assert len((await good).ids) == 5
    assert engine.failure is None
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_stopping_fails_requests_in_flight(make_engine, make_request):
    engine = make_engine()
    with pytest.raises(WorkerFailed):
        await generate(engine, make_request(range(9)))
    await engine.start()
    reply = RecordingReply()
    async with BackgroundTasks() as tasks:
        running = tasks.start(generate(engine, make_request(range(9), max_tokens=1000), reply))
        await reply.first.wait()
        await engine.stop()
        with pytest.raises(WorkerFailed):
            await running
    with pytest.raises(WorkerFailed):
        await generate(engine, make_request(range(9)))


async def test_a_higher_priority_is_admitted_first(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    await engine.start()
    order = []

    async def request(name, priority):
        await generate(engine, make_request(range(9), max_tokens=2, priority=priority))
        order.append(name)

    await run_all(request("first", 0), request("second", 0), request("urgent", 5))
    assert order == ["urgent", "first", "second"]
    await engine.stop()


async def test_a_failed_loop_fails_all_requests_and_notifies_listeners(
    make_engine, make_request, monkeypatch
):
    engine = make_engine()
    await engine.start()
    notified = []
    engine.on_failure(lambda: notified.append(True))

    def broken(plan, tokens):
        raise ArithmeticError

    monkeypatch.setattr(engine.scheduler, "complete", broken)
    errors = []
    for _ in range(3):
        with pytest.raises(WorkerFailed) as caught:
            await generate(engine, make_request(range(9)))
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3  # a shared error would collect tracebacks
    assert notified == [True]
    assert engine.failure is not None
    await engine.stop()
