"""Which prompts arrive, wait for each other, and are preempted."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.inference_disaggregation.pair import Pair, local_answer, make_request, with_pair

from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import run_all
from dynamo.core.timing.model import Timing
from dynamo.core.values import RequestGroup
from dynamo.inference.requests.prefill_calls import PrefillCall

SLOW = {"timing": Timing(c0=2.0, c1=3.0)}


def test_choices_of_a_prompt_are_answered_like_single_requests() -> None:
    async def main(pair: Pair) -> None:
        request = make_request(range(37))
        alone = await local_answer(pair, request)
        group = RequestGroup(request)
        choices = [replace(request, choice=number, group=group) for number in range(4)]
        replies = await run_all(*(pair.answer(choice) for choice in choices))
        assert [reply.ids for reply in replies] == [alone.ids] * 4
        assert not pair.arrivals.fallbacks
        assert (pair.peer.calls, pair.arrivals.blocks_arrived) == (1, 10)

    with_pair(main, d={"num_blocks": 30, "max_num_seqs": 3})


def test_choices_whose_prompt_does_not_arrive_go_on() -> None:
    """The first choice is cancelled. The second one pulls instead, until its peer is gone."""

    async def main(pair: Pair) -> None:
        request = make_request(range(64))
        alone = await local_answer(pair, request)
        sent = [pair.send(replace(request, choice=number)) for number in range(4)]
        await pair.clock.sleep(0.020)
        sent[0][1].cancel()
        await pair.clock.sleep(0.030)
        pair.p.plane.abort()
        await asyncio.wait([task for _, task in sent])
        assert [reply.ids for reply, _ in sent[1:]] == [alone.ids] * 3
        assert pair.peer.calls == 2
        assert pair.arrivals.fallbacks.total() == 3

    with_pair(main)


def test_a_running_answer_preempts_arriving_prompts_of_a_lower_priority() -> None:
    async def main(pair: Pair) -> None:
        high = make_request(range(8), prefill="", max_tokens=40, priority=1)
        low = make_request(range(100, 228), max_tokens=5)
        alone = [(await local_answer(pair, request)).ids for request in (high, low)]
        (reply, answer), (low_reply, arrival) = pair.send(high), pair.send(low)
        await answer
        assert pair.d.engine.scheduler.preemptions == 1
        assert not low_reply.ids
        await arrival
        assert [reply.ids, low_reply.ids] == alone
        assert pair.peer.calls == 2
        assert not pair.arrivals.fallbacks

    with_pair(main, p=SLOW, d={"num_blocks": 36})


def test_a_running_answer_waits_for_arriving_prompts_of_its_priority() -> None:
    async def main(pair: Pair) -> None:
        running = make_request(range(8), prefill="", max_tokens=40)
        requests = [running, make_request(range(99, 227), max_tokens=5)]
        alone = [(await local_answer(pair, request)).ids for request in requests]
        sent = [pair.send(request) for request in requests]
        await asyncio.wait([task for _, task in sent])
        assert [reply.ids for reply, _ in sent] == alone
        assert pair.peer.calls == 1

    with_pair(main, p=SLOW, d={"num_blocks": 36})


def test_a_report_that_fails_ends_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(pair: Pair) -> None:
        requests = [make_request(range(n, n + 64)) for n in range(2)]
        alone = [(await local_answer(pair, request)).ids for request in requests]
        report = PrefillCall.report_blocks

        def fail_for_the_first(call: PrefillCall) -> None:
            if call.sequence.tokens[0] == 0:
                raise ArithmeticError("a report fails")
            report(call)

        monkeypatch.setattr(PrefillCall, "report_blocks", fail_for_the_first)
        replies = await run_all(*(pair.answer(request) for request in requests))
        assert [reply.ids for reply in replies] == alone
        assert pair.p.engine.failure is None
        assert pair.arrivals.fallbacks == {"internal_error": 1}

    with_pair(main)


def test_a_prompt_behind_others_is_not_given_up() -> None:
    """Prompts of 7 s stand in front of it; the deadline without them would be 5.5 s."""

    async def main(pair: Pair) -> None:
        own = [make_request(range(n, n + 60), prefill="", max_tokens=1) for n in range(40)]
        sent = [pair.send(request, pair.p.engine) for request in own]
        await pair.clock.sleep(0.001)
        started_s = pair.clock.now()
        reply, task = pair.send(make_request(range(500, 564)))
        await task
        assert pair.clock.now() - started_s > 7
        assert not pair.arrivals.fallbacks
        assert len(reply.ids) == 20
        await asyncio.wait([task for _, task in sent])

    with_pair(main, p={**SLOW, "prefix_caching": False})


@pytest.mark.parametrize(
    ("length", "attempt", "only_decodes", "resent"),
    [(64, 0, True, True), (64, 16, True, False), (64, 0, False, False), (16, 0, True, False)],
)
def test_a_long_prompt_whose_prefill_worker_failed_is_sent_again(
    length: int, attempt: int, *, only_decodes: bool, resent: bool
) -> None:
    async def main(pair: Pair) -> None:
        pair.source.only_decodes = only_decodes
        reply, task = pair.send(make_request(range(length)), attempt=attempt)
        await pair.clock.sleep(0.010)
        await pair.p.engine.stop()
        await asyncio.wait((task,))
        error = task.exception()
        assert pair.arrivals.fallbacks == {"sent again" if resent else "worker_failed": 1}
        if resent:
            assert isinstance(error, WorkerFailed)
            assert error.instance == "p"
        else:
            assert error is None
            assert len(reply.ids) == 20

    with_pair(main)


@pytest.mark.parametrize(("slot_bytes", "moves"), [(100, True), (100_000, False)])
def test_a_running_request_is_moved_where_that_is_quicker(slot_bytes: int, *, moves: bool) -> None:
    """A block takes 0.1 or 100 ms by the link and 4 ms to compute."""

    async def main(pair: Pair) -> None:
        request = make_request(range(40), prefill="", resumed=10)
        await pair.send(request, pair.p.engine)[1]
        for _ in range(3):  # the decode worker learns its speed
            await pair.answer(make_request(range(200, 240), prefill=""))
            pair.d.engine.clear_prefix_cache()
        steps = pair.p.engine.counters.steps
        reply = await pair.answer(replace(request, kv_from="p"))
        assert len(reply.ids) == 20
        assert pair.arrivals.moved == moves
        assert pair.peer.calls == moves
        assert pair.p.engine.counters.steps == steps + moves
        assert not pair.arrivals.fallbacks

    sizes = {"slot_bytes": slot_bytes}
    with_pair(main, p=sizes, d=sizes)
