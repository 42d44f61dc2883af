"""What an engine says to a probe, and to a request that failed elsewhere."""

from __future__ import annotations

import asyncio

from dynamo.core.context import Context
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import ProbeResult
from dynamo.inference.mock.runner import MockRunner
from dynamo.inference.probe import answer_probe


async def test_an_idle_engine_computes_a_token_for_a_probe(make_engine):
    engine = make_engine()
    await engine.start()
    assert await answer_probe(engine) == ProbeResult(steps=1, requests=0)
    assert await answer_probe(engine) == ProbeResult(steps=2, requests=0)
    assert engine.report_load().active_blocks == 0
    await engine.stop()


async def test_a_busy_one_shows_what_it_has_computed(make_engine, make_request, heard):
    engine = make_engine()
    await engine.start()
    async with BackgroundTasks() as tasks:
        reply = heard()
        tasks.start(engine.generate(make_request(range(20), max_tokens=900), Context("r"), reply))
        await reply.first.wait()
        first = await answer_probe(engine)
        assert first.requests == 1
        while (await answer_probe(engine)).steps == first.steps:
            await asyncio.sleep(0)
    await engine.stop()


async def test_a_retried_request_hears_when_it_enters_the_batch(
    make_engine, make_request, heard, monkeypatch
):
    engine = make_engine()
    await engine.start()
    computing, go_on = asyncio.Event(), asyncio.Event()
    step = MockRunner.step

    async def held(self, plan):
        computing.set()
        await go_on.wait()
        return await step(self, plan)

    monkeypatch.setattr(MockRunner, "step", held)
    first, again = heard(), heard()
    async with BackgroundTasks() as tasks:
        request = make_request(range(20), max_tokens=3)
        calls = [
            tasks.start(engine.generate(request, Context("a"), first)),
            tasks.start(engine.generate(request, Context("b", attempt=1), again)),
        ]
        await computing.wait()
        assert first.started is None
        assert again.started is not None
        go_on.set()
        await asyncio.wait(calls)
    assert first.ids == again.ids
    assert len(again.ids) == 3
    await engine.stop()
