"""Answers of an engine to probes, and the early begin of retried requests."""

from __future__ import annotations

import asyncio

from tests.unit.inference.conftest import RecordingReply

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


async def test_a_busy_engine_reports_its_progress(make_engine, make_request):
    engine = make_engine()
    await engine.start()
    async with BackgroundTasks() as tasks:
        reply = RecordingReply()
        tasks.start(engine.generate(make_request(range(20), max_tokens=900), Context("r"), reply))
        await reply.first.wait()
        first = await answer_probe(engine)
        assert first.requests == 1
        while (await answer_probe(engine)).steps == first.steps:
            await asyncio.sleep(0)
    await engine.stop()


async def test_a_retried_request_begins_when_it_enters_the_batch(
    make_engine, make_request, monkeypatch
):
    engine = make_engine()
    await engine.start()
    computing, resume = asyncio.Event(), asyncio.Event()
    step = MockRunner.step

    async def blocked_step(self, plan):
        computing.set()
        await resume.wait()
        return await step(self, plan)

    monkeypatch.setattr(MockRunner, "step", blocked_step)
    first, retried = RecordingReply(), RecordingReply()
    async with BackgroundTasks() as tasks:
        request = make_request(range(20), max_tokens=3)
        calls = [
            tasks.start(engine.generate(request, Context("a"), first)),
            tasks.start(engine.generate(request, Context("b", attempt=1), retried)),
        ]
        await computing.wait()
        assert first.started is None
        assert retried.started is not None
        resume.set()
        await asyncio.wait(calls)
    assert first.ids == retried.ids
    assert len(retried.ids) == 3
    await engine.stop()
