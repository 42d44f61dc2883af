"""Conformance tests for every engine."""
# ruff: noqa: S101, ARG002

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

import pytest
from msgspec.structs import replace

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, WorkerFailed
from dynamo.core.reply import Engine, EngineRank, LogprobsPerToken
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import (
    BlocksRemoved,
    BlocksStored,
    Finish,
    GenerateRequest,
    KvEvent,
    RequestGroup,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.testing.fakes import CollectedReply

ENGINE_CONTEXT = Context("request-1")
PROMPT = tuple(range(3, 43))
MAX_CONTEXT_TOKENS = 1 << 16
SETTLE_S = 2.0
"""An engine in other processes reports the state after an answer within this time."""


class OrderCheckingReply(CollectedReply):
    """A reply that asserts the order of its calls. `first_token` is set by the first token."""

    def __init__(self, token_limit: int | None = None) -> None:
        super().__init__(token_limit)
        self.first_token = asyncio.Event()
        self._finished = False

    def begin(self, started: Started) -> None:
        assert self.started is None
        super().begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        assert self.started is not None
        assert not self._finished
        self.first_token.set()
        self._finished = not super().tokens(ids, logprobs)
        return not self._finished

    def finish(self, end: Finish) -> None:
        assert self.started is not None
        assert not self._finished
        self._finished = True
        super().finish(end)


def make_request(ids: Sequence[int] = PROMPT, tokens: int = 8, resumed: int = 0) -> GenerateRequest:
    """Return a greedy request that ends only by its length."""
    stops = StopConditions(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        "request-1", "m", pack_ids(ids), SamplingParams(temperature=0), stops, resumed=resumed
    )


async def generate_reply(engine: Engine, request: GenerateRequest) -> OrderCheckingReply:
    """Generate and return the whole answer."""
    reply = OrderCheckingReply()
    await engine.generate(request, ENGINE_CONTEXT, reply)
    return reply


async def settle(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds, at the latest after `SETTLE_S`."""
    for _ in range(int(SETTLE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)


async def assert_idle(engine: Engine) -> None:
    """Assert that within `SETTLE_S` no request runs, waits or holds blocks."""

    def busy() -> tuple[int, int, int]:
        load = engine.report_load()
        return load.running, load.waiting, load.active_blocks

    await settle(lambda: not any(busy()))
    assert busy() == (0, 0, 0)


class EventView:
    """The blocks of one rank according to its events, beginning with those that it has now."""

    def __init__(self, rank: EngineRank) -> None:
        self.rank = rank
        self.blocks: set[int] = set()
        self._apply(rank.snapshot_kv_events())
        rank.on_kv_events(self._apply)

    async def assert_matches_snapshot(self) -> None:
        """Assert that within `SETTLE_S` the events have reported what the rank holds."""
        await settle(lambda: self.blocks == self._held())
        assert self.blocks == self._held()

    def _held(self) -> set[int]:
        events = self.rank.snapshot_kv_events()
        return {block for event in events for block in getattr(event, "hashes", ())}

    def _apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.blocks.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self.blocks.difference_update(event.hashes)
            else:
                self.blocks.clear()


class EngineConformance:
    """Tests of the fixture `engine`, a started engine with ids below 100 and room for 64 tokens.

    Other tests may have used the engine, as its start may take long; the last test stops it.
    """

    async def test_answer_has_requested_length_in_order(self, engine: Engine) -> None:
        reply = await generate_reply(engine, make_request(tokens=5))
        assert reply.started is not None
        assert reply.started.prompt_tokens == len(PROMPT)
        assert reply.end == Finish("length", 5)
        assert len(reply.ids) == 5
        await assert_idle(engine)

    async def test_batching_does_not_change_tokens(self, engine: Engine) -> None:
        requests = [make_request(PROMPT[start:]) for start in range(6)]
        alone = [(await generate_reply(engine, request)).ids for request in requests]
        together = await run_all(*(generate_reply(engine, request) for request in requests))
        assert [reply.ids for reply in together] == alone

    async def test_choices_of_a_group_get_the_tokens_of_single_requests(
        self, engine: Engine
    ) -> None:
        request = make_request(tokens=8)
        sampling = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5)
        request = replace(request, sampling=sampling)
        alone = (await generate_reply(engine, request)).ids
        group = RequestGroup(request)
        choices = [replace(request, choice=number, group=group) for number in range(4)]
        together = await run_all(*(generate_reply(engine, choice) for choice in choices))
        assert [reply.ids for reply in together] == [alone] * 4
        await assert_idle(engine)

    async def test_resumed_request_continues_the_answer(self, engine: Engine) -> None:
        whole = (await generate_reply(engine, make_request(tokens=8))).ids
        for cut in (1, 5, 7):
            rest = make_request((*PROMPT, *whole[:cut]), 8 - cut, resumed=cut)
            assert whole[:cut] + (await generate_reply(engine, rest)).ids == whole

    async def test_reply_that_returns_false_ends_without_finish(self, engine: Engine) -> None:
        reply = OrderCheckingReply(token_limit=2)
        await engine.generate(make_request(), ENGINE_CONTEXT, reply)
        assert (len(reply.ids), reply.end) == (2, None)
        await assert_idle(engine)

    @pytest.mark.parametrize("turns", [0, 1, 2, 3])
    async def test_cancellation_frees_all_resources(self, engine: Engine, turns: int) -> None:
        async with BackgroundTasks() as tasks:
            calls = [tasks.start(generate_reply(engine, make_request(tokens=20))) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)
        await assert_idle(engine)
        assert len((await generate_reply(engine, make_request(tokens=2))).ids) == 2

    async def test_invalid_requests_are_refused(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequest):
            await generate_reply(engine, make_request(()))
        with pytest.raises(ContextLengthExceeded):
            await generate_reply(engine, make_request((7,) * MAX_CONTEXT_TOKENS))
        await assert_idle(engine)

    async def test_failing_reply_fails_only_its_request(self, engine: Engine) -> None:
        class FailingReply(OrderCheckingReply):
            def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
                raise ZeroDivisionError

        async with BackgroundTasks() as tasks:
            good = tasks.start(generate_reply(engine, make_request()))
            with pytest.raises(ZeroDivisionError):
                await engine.generate(make_request(), ENGINE_CONTEXT, FailingReply())
            assert len((await good).ids) == 8
        await assert_idle(engine)

    async def test_kv_events_match_cached_blocks(self, engine: Engine) -> None:
        views = [EventView(rank) for rank in engine.ranks]
        await run_all(
            *(generate_reply(engine, make_request(PROMPT[start:], 20)) for start in range(6))
        )
        for view in views:
            await view.assert_matches_snapshot()

    async def test_clear_blocks_empties_every_rank_at_once(self, engine: Engine) -> None:
        views = [EventView(rank) for rank in engine.ranks]
        await generate_reply(engine, make_request())
        await assert_idle(engine)
        assert await engine.clear_blocks() >= 0
        assert not any(view.blocks or view.rank.snapshot_kv_events() for view in views)
        reply = await generate_reply(engine, make_request())
        assert reply.started is not None
        assert reply.started.cached_tokens == 0

    async def test_salted_prompts_share_no_blocks_with_others(self, engine: Engine) -> None:
        salted = replace(make_request(), salt=f"salt-{monotonic()}")
        for request in (make_request(), make_request()):
            unsalted = await generate_reply(engine, replace(request, rank=0))
        first = await generate_reply(engine, replace(salted, rank=0))
        second = await generate_reply(engine, replace(salted, rank=0))
        assert unsalted.started is not None
        assert first.started is not None
        assert first.started.cached_tokens == 0
        assert second.started == unsalted.started
        assert first.ids == second.ids == unsalted.ids

    async def test_retried_request_gets_the_same_answer(self, engine: Engine) -> None:
        whole = await generate_reply(engine, make_request())
        retried = OrderCheckingReply()
        await engine.generate(make_request(), replace(ENGINE_CONTEXT, attempt=1), retried)
        assert retried.ids == whole.ids
        assert retried.end == whole.end

    async def test_each_rank_answers_and_reports_its_own_blocks(self, engine: Engine) -> None:
        load, ranks = engine.report_load(), engine.ranks
        assert len(load.ranks) == (len(ranks) if len(ranks) > 1 else 0)
        await engine.clear_blocks()
        views = [EventView(rank) for rank in ranks]
        expected: set[int] = set()
        for number, view in enumerate(views):
            await generate_reply(engine, replace(make_request(), rank=number))
            await view.assert_matches_snapshot()
            expected = expected or set(view.blocks)
            assert view.blocks == expected
            assert not any(other.blocks for other in views[number + 1 :])

    async def test_stop_fails_requests_in_flight(self, engine: Engine) -> None:
        reply = OrderCheckingReply()
        async with BackgroundTasks() as tasks:
            running = tasks.start(engine.generate(make_request(tokens=20), ENGINE_CONTEXT, reply))
            await reply.first_token.wait()
            await engine.stop()
            with pytest.raises(WorkerFailed):
                await running
        with pytest.raises(WorkerFailed):
            await generate_reply(engine, make_request())
