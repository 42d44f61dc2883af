"""What every engine promises."""
# ruff: noqa: S101, ARG002

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest, WorkerFailed
from dynamo.core.reply import Engine, Extra
from dynamo.core.tasks import Tasks, run_all
from dynamo.core.values import (
    BlocksRemoved,
    BlocksStored,
    Finish,
    GenerateRequest,
    KvEvent,
    Sampling,
    Started,
    Stops,
)
from dynamo.testing.replies import CollectedReply

HERE = Context("request-1")
PROMPT = tuple(range(3, 43))
MOST_CONTEXT = 1 << 16


class OrderedReply(CollectedReply):
    """Sees to the order of calls. `first`: a token has come."""

    def __init__(self, enough: int | None = None) -> None:
        super().__init__(enough)
        self.first = asyncio.Event()
        self._over = False

    def begin(self, started: Started) -> None:
        assert self.started is None
        super().begin(started)

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        assert self.started is not None
        assert not self._over
        self.first.set()
        self._over = not super().tokens(ids, extra)
        return not self._over

    def finish(self, end: Finish) -> None:
        assert self.started is not None
        assert not self._over
        self._over = True
        super().finish(end)


def wanted(ids: Sequence[int] = PROMPT, tokens: int = 8, resumed: int = 0) -> GenerateRequest:
    """Greedy, and only its length ends it."""
    stops = Stops(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        "request-1", "m", pack_ids(ids), Sampling(temperature=0), stops, resumed=resumed
    )


async def ask(engine: Engine, request: GenerateRequest) -> OrderedReply:
    """The whole answer."""
    reply = OrderedReply()
    await engine.generate(request, HERE, reply)
    return reply


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits, or holds memory for a request."""
    load = engine.load()
    assert (load.running, load.waiting, load.active_blocks) == (0, 0, 0)


class EngineConformance:
    """The fixture `engine` is a started one that knows ids up to 99, holds 64 tokens and more, and
    is stopped afterwards."""

    async def test_an_answer_comes_in_order_and_as_long_as_asked(self, engine: Engine) -> None:
        reply = await ask(engine, wanted(tokens=5))
        assert reply.started is not None
        assert reply.started.prompt_tokens == len(PROMPT)
        assert reply.end == Finish("length", 5)
        assert len(reply.ids) == 5
        assert_idle(engine)

    async def test_others_beside_it_change_no_token(self, engine: Engine) -> None:
        requests = [wanted(PROMPT[start:]) for start in range(6)]
        alone = [(await ask(engine, request)).ids for request in requests]
        together = await run_all(*(ask(engine, request) for request in requests))
        assert [reply.ids for reply in together] == alone

    async def test_a_request_goes_on_where_it_was_cut(self, engine: Engine) -> None:
        whole = (await ask(engine, wanted(tokens=8))).ids
        for cut in (1, 5, 7):
            rest = wanted((*PROMPT, *whole[:cut]), 8 - cut, resumed=cut)
            assert whole[:cut] + (await ask(engine, rest)).ids == whole

    async def test_enough_ends_it_without_a_finish(self, engine: Engine) -> None:
        reply = OrderedReply(enough=2)
        await engine.generate(wanted(), HERE, reply)
        assert (len(reply.ids), reply.end) == (2, None)
        assert_idle(engine)

    @pytest.mark.parametrize("turns", [0, 1, 2, 3])
    async def test_being_cancelled_frees_all(self, engine: Engine, turns: int) -> None:
        async with Tasks() as tasks:
            gone = [tasks.start(ask(engine, wanted(tokens=20))) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.wait(gone)
        assert_idle(engine)
        assert len((await ask(engine, wanted(tokens=2))).ids) == 2

    async def test_what_it_cannot_compute_is_refused(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequest):
            await ask(engine, wanted(()))
        with pytest.raises(ContextLengthExceeded):
            await ask(engine, wanted((7,) * MOST_CONTEXT))
        assert_idle(engine)

    async def test_a_reply_that_fails_fails_alone(self, engine: Engine) -> None:
        class Bad(OrderedReply):
            def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
                raise ZeroDivisionError

        async with Tasks() as tasks:
            good = tasks.start(ask(engine, wanted()))
            with pytest.raises(ZeroDivisionError):
                await engine.generate(wanted(), HERE, Bad())
            assert len((await good).ids) == 8
        assert_idle(engine)

    async def test_events_tell_what_it_holds(self, engine: Engine) -> None:
        held: set[int] = set()

        def apply(events: Sequence[KvEvent]) -> None:
            for event in events:
                if isinstance(event, BlocksStored):
                    held.update(event.hashes)
                elif isinstance(event, BlocksRemoved):
                    held.difference_update(event.hashes)
                else:
                    held.clear()

        engine.on_kv_events(apply)
        await run_all(*(ask(engine, wanted(PROMPT[start:], 20)) for start in range(6)))
        told = set(held)
        apply(engine.held_blocks())
        assert held == told

    async def test_stopping_ends_what_is_in_work(self, engine: Engine) -> None:
        reply = OrderedReply()
        async with Tasks() as tasks:
            running = tasks.start(engine.generate(wanted(tokens=20), HERE, reply))
            await reply.first.wait()
            await engine.stop()
            with pytest.raises(WorkerFailed):
                await running
        with pytest.raises(WorkerFailed):
            await ask(engine, wanted())
