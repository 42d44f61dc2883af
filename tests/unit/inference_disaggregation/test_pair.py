"""A prompt that one engine computes for another gives the answer of a single engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import Pair, local_answer, make_request, with_pair

from dynamo.core.tasks import run_all
from dynamo.core.timing.model import Timing
from dynamo.core.values import (
    BlocksStored,
    Finish,
    KvEvent,
    ProbeResult,
    Started,
)
from dynamo.inference.probe import answer_probe

SMALL_CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 8}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 40, 41, 63])
def test_the_answer_is_that_of_one_engine(length: int) -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(length), top_logprobs=2)
        alone = await local_answer(pair, request)
        reply = await pair.answer(request)
        assert (reply.ids, reply.extras[0], reply.end) == (alone.ids, alone.extras[0], alone.end)
        assert reply.started == Started(prompt_tokens=length)
        assert pair.peer.calls == 1
        assert pair.arrivals.blocks_arrived == -(-length // 4)
        assert not pair.arrivals.fallbacks

    with_pair(main)


@pytest.mark.parametrize(
    "fields",
    [
        {"salt": "tenant"},
        {"resumed": 7},
        {"choice": 3},
        {"max_tokens": 2},
        {"max_tokens": 100},
        {"min_tokens": 5, "stop_token_ids": tuple(range(100, 500))},
    ],
    ids=str,
)
def test_fields_of_a_request_mean_the_same(fields: dict[str, Any]) -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(30), **fields)
        alone = await local_answer(pair, request)
        for _ in range(2):
            reply = await pair.answer(request)
            assert (reply.ids, reply.end) == (alone.ids, alone.end)
        assert not pair.arrivals.fallbacks

    with_pair(main)


def test_an_answer_of_one_token_moves_no_blocks() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(30), max_tokens=1)
        alone = await local_answer(pair, request)
        reply = await pair.answer(request)
        assert (reply.ids, reply.end) == (alone.ids, Finish("length", 1))
        assert pair.arrivals.blocks_arrived == 0
        assert not pair.arrivals.fallbacks

    with_pair(main, p=SMALL_CHUNKS)


def test_an_answer_that_stops_at_its_first_token_ends_at_once() -> None:
    async def main(pair: Pair) -> None:
        first = (await local_answer(pair, make_request(range(30)))).ids[0]
        reply = await pair.answer(make_request(range(30), stop_token_ids=(first,)))
        assert reply.ids == []
        assert reply.end is not None
        assert (reply.end.reason, reply.end.stop_token) == ("stop", first)
        assert (await pair.answer(make_request(range(30)), limit=1)).ids == [first]
        assert not pair.arrivals.fallbacks

    with_pair(main)


def test_cached_tokens_are_those_that_nobody_computed() -> None:
    async def main(pair: Pair) -> None:
        await pair.answer(make_request(range(20)))
        reply = await pair.answer(make_request(range(40)))
        assert reply.started is not None
        assert reply.started.cached_tokens == 20
        assert pair.arrivals.blocks_saved == 5
        assert pair.arrivals.blocks_arrived == 5 + 5
        calls = pair.peer.calls
        reply = await pair.answer(make_request(range(41)))
        assert reply.started is not None
        assert reply.started.cached_tokens == 40
        assert pair.peer.calls == calls, "a prompt that is cached here is not sent away"

    with_pair(main)


def test_blocks_are_pulled_while_later_chunks_are_computed() -> None:
    """32 blocks take 32 ms, as long as the chunks; only the last chunk's transfer is not hidden."""

    async def main(pair: Pair) -> None:
        now = pair.clock.now
        started_s = now()
        reply, task = pair.send(make_request(range(128), max_tokens=3))
        while not reply.ids:
            await pair.clock.sleep(0.001)
        first_s = now() - started_s
        await task
        assert first_s == pytest.approx(8 * 0.018, abs=0.002)
        assert pair.arrivals.wait_s == pytest.approx(8 * 0.018 + 0.004, abs=0.002)
        assert reply.times is not None
        assert reply.times.kv_after_s == pytest.approx(0.004, abs=0.002)

    with_pair(main)


def test_events_tell_of_the_blocks_that_have_arrived() -> None:
    async def main(pair: Pair) -> None:
        events: list[KvEvent] = []
        pair.d.engine.on_kv_events(events.extend)
        await pair.answer(make_request(range(40), max_tokens=10))
        hashes = [h for event in events if isinstance(event, BlocksStored) for h in event.hashes]
        assert len(hashes) == len(set(hashes)) == 12
        dump = pair.d.engine.snapshot_kv_events()
        assert set(hashes) == {h for e in dump if isinstance(e, BlocksStored) for h in e.hashes}

    with_pair(main)


def test_a_block_with_another_content_alters_the_answer() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(40))
        alone = await local_answer(pair, request)
        pair.p.engine.runner.export_blocks = lambda *_: None  # type: ignore[method-assign]
        reply = await pair.answer(request)
        assert reply.ids[0] == alone.ids[0]
        assert reply.ids != alone.ids

    with_pair(main)


def test_arrivals_do_not_disturb_running_answers() -> None:
    """While answers are skipped ahead in virtual time, prompts arrive, with the same tokens and
    the same times as in single steps."""

    def run(min_steps: int) -> list[Any]:
        async def main(pair: Pair) -> list[Any]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("dynamo.inference.fast_forward.MIN_STEPS", min_steps)
                sent = []
                for number in range(6):
                    prompt = range(number, number + 20 + 7 * number)
                    sent.append(pair.send(make_request(prompt, max_tokens=40 + number)))
                    await pair.clock.sleep(0.013)
                ends = []
                for _, task in sent:
                    task.add_done_callback(lambda _: ends.append(round(pair.clock.now(), 6)))
                for _, task in sent:
                    await task
                return [[reply.ids for reply, _ in sent], ends]

        no_ties = Timing(c0=2.0137, c1=1.0071)
        return with_pair(main, p={"timing": no_ties}, d={"num_blocks": 200})

    assert run(2) == run(1 << 40)


def test_the_load_counts_arriving_requests_as_running() -> None:
    async def main(pair: Pair) -> None:
        _, task = pair.send(make_request(range(100)))
        await pair.clock.sleep(0.005)
        load = pair.d.engine.report_load()
        assert (load.running, load.arriving, load.waiting, load.prefill_tokens) == (1, 1, 0, 0)
        assert load.active_blocks == 25
        assert pair.p.engine.report_load().prefill_tokens == 100
        await task

    with_pair(main)


def test_the_load_names_the_learnt_rate_of_transfers() -> None:
    async def main(pair: Pair) -> None:
        assert pair.d.engine.report_load().transfer_bytes_per_s == 0
        _, task = pair.send(make_request(range(100)))
        await task
        assert pair.d.engine.report_load().transfer_bytes_per_s == 1e6  # as its link
        assert pair.p.engine.report_load().transfer_bytes_per_s == 0

    with_pair(main)


def test_an_engine_that_waits_for_blocks_is_not_stuck() -> None:
    """Without steps it reports no requests to probes, even if all its batch slots wait."""

    async def main(pair: Pair) -> None:
        tasks = [pair.send(make_request(range(n, n + 64)))[1] for n in range(3)]
        await pair.clock.sleep(0.005)
        assert await answer_probe(pair.d.engine) == ProbeResult(steps=0, requests=0)
        await asyncio.wait(tasks)

    with_pair(main, d={"max_num_seqs": 2})


@pytest.mark.parametrize("caching", [(True, False), (False, True), (False, False)], ids=str)
def test_engines_without_a_prefix_cache_take_part(caching: tuple[bool, bool]) -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(50))
        alone = await local_answer(pair, request)
        for _ in range(2):
            assert (await pair.answer(request)).ids == alone.ids
        assert not pair.arrivals.fallbacks

    p, d = caching
    with_pair(main, p={"prefix_caching": p}, d={"prefix_caching": d})


def test_too_few_blocks_on_either_side_delay_and_do_not_alter_answers() -> None:
    async def main(pair: Pair) -> None:
        requests = [make_request(range(n, n + 30), max_tokens=60) for n in range(10)]
        alone = [(await local_answer(pair, request)).ids for request in requests]
        replies = await run_all(*(pair.answer(request) for request in requests))
        assert [reply.ids for reply in replies] == alone
        assert pair.d.engine.scheduler.preemptions > 0

    with_pair(main, p={"num_blocks": 24}, d={"num_blocks": 40})


def test_a_prefill_worker_that_decodes_too_may_preempt_prompts() -> None:
    async def main(pair: Pair) -> None:
        own = [make_request(range(n, n + 8), max_tokens=60, prefill="") for n in range(3)]
        remote = [make_request(range(n, n + 60), max_tokens=20) for n in range(50, 54)]
        alone = [(await local_answer(pair, request)).ids for request in [*own, *remote]]
        sent = [pair.send(request, pair.p.engine) for request in own]
        await pair.clock.sleep(0.1)
        sent += [pair.send(request) for request in remote]
        for _, task in sent:
            await task
        assert [reply.ids for reply, _ in sent] == alone
        assert pair.p.engine.scheduler.preemptions > 0

    with_pair(main, p={"num_blocks": 52, **SMALL_CHUNKS})


async def check_goes_on(pair: Pair) -> None:
    """Check that both engines serve after a fault."""
    request = make_request(range(200, 230), max_tokens=5)
    alone = await local_answer(pair, request)
    assert (await pair.answer(request)).ids == alone.ids


@pytest.mark.parametrize("after_ms", [0, 1, 5, 18, 19, 36, 60, 71, 72, 73, 74, 90, 130])
def test_a_client_that_leaves_frees_everything(after_ms: int) -> None:
    """At 0 the request waits, then chunks are computed until 72 ms, and the answer is written."""

    async def main(pair: Pair) -> None:
        _, task = pair.send(make_request(range(64), max_tokens=60))
        await pair.clock.sleep(after_ms / 1e3)
        task.cancel()
        await asyncio.wait((task,))
        assert pair.d.engine.report_load().active_blocks == 0
        await pair.check_idle()
        assert not pair.arrivals.fallbacks
        await check_goes_on(pair)

    with_pair(main)


@pytest.mark.parametrize("after_ms", [0, 1, 18, 19, 36, 60, 71, 72, 73, 74, 90])
@pytest.mark.parametrize("fault", ["engine fails", "memory is gone", "pool is cleared"])
def test_a_failing_prefill_worker_changes_no_token(fault: str, after_ms: int) -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(64), max_tokens=60)
        alone = await local_answer(pair, request)
        reply, task = pair.send(request)
        await pair.clock.sleep(after_ms / 1e3)
        if fault == "engine fails":
            await pair.p.engine.stop()
        elif fault == "memory is gone":
            pair.p.plane.abort()
        else:
            pair.p.engine.clear_prefix_cache()
            pair.d.engine.clear_prefix_cache()
        await task
        assert (reply.ids, reply.end) == (alone.ids, alone.end)
        failed = sum(pair.arrivals.fallbacks.values())
        assert failed == (fault != "pool is cleared" and after_ms < 4 * 18 + 4)
        if failed:  # a chunk takes 18 ms, its blocks 4 ms
            assert pair.arrivals.blocks_arrived == max(0, after_ms - 4) // 18 * 4

    with_pair(main)


def test_a_frozen_prefill_worker_is_given_up_after_the_predicted_time() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(64))
        alone = await local_answer(pair, request)

        async def freeze() -> None:
            await asyncio.Event().wait()

        pair.peer.before_call = freeze
        started_s = pair.clock.now()
        assert (await pair.answer(request)).ids == alone.ids
        assert 5 < pair.clock.now() - started_s < 7
        assert pair.arrivals.fallbacks == {"transfer timeout": 1}

    with_pair(main)


def test_a_stalled_transfer_is_given_up_after_the_predicted_time() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(64))
        alone = await local_answer(pair, request)
        reply, task = pair.send(request)
        await pair.clock.sleep(0.030)
        pair.p.plane.sever()
        started_s = pair.clock.now()
        await task
        assert reply.ids == alone.ids
        assert pair.clock.now() - started_s < 3
        assert pair.arrivals.fallbacks == {"transfer timeout": 1}
        pair.p.plane.rejoin()

    with_pair(main)


def test_an_unknown_prefill_worker_and_an_older_engine_compute_here() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(64), prefill="gone")
        alone = await local_answer(pair, request)
        assert (await pair.answer(request)).ids == alone.ids
        assert pair.arrivals.fallbacks == {"transfer gone": 1}
        assert (await pair.answer(replace(request, prefill="d"))).ids == alone.ids
        pair.d.engine.kv_source = None
        assert (await pair.answer(replace(request, prefill="p"))).ids == alone.ids
        assert pair.arrivals.fallbacks == {"transfer gone": 1}

    with_pair(main)


def test_an_engine_that_stops_ends_arriving_and_held_prompts() -> None:
    async def main(pair: Pair) -> None:
        tasks = [pair.send(make_request(range(n, n + 64)))[1] for n in range(3)]
        await pair.clock.sleep(0.030)
        await pair.d.engine.stop()
        await asyncio.wait(tasks)
        assert all("stopped" in str(task.exception()) for task in tasks)

    with_pair(main)
