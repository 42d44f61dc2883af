"""Tests that ScriptedEngine and CollectedReply keep the contracts of Engine and Reply."""

from __future__ import annotations

import pytest

from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    EngineInfo,
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
)
from dynamo.testing import CollectedReply, ScriptedEngine

INFO = EngineInfo("scripted", 16, 4, 64, 1, 64)
REQUEST = GenerateRequest("r", "m", b"", SamplingParams(), StopConditions())
STARTED, END = Started("w"), Finish("stop", 3)


async def test_a_script_is_generated_completely() -> None:
    engine, reply = ScriptedEngine(INFO, STARTED, [1, 2, 3], END), CollectedReply()
    assert await engine.start() == INFO
    await engine.generate(REQUEST, Context("r"), reply)
    assert (reply.started, reply.ids, reply.end) == (STARTED, [1, 2, 3], END)
    assert engine.requests == [REQUEST]


async def test_a_full_reply_gets_no_finish() -> None:
    engine, reply = ScriptedEngine(INFO, STARTED, [1, 2, 3], END), CollectedReply(token_limit=2)
    await engine.generate(REQUEST, Context("r"), reply)
    assert (reply.ids, reply.end) == ([1, 2], None)


async def test_an_error_is_raised_after_the_tokens() -> None:
    engine = ScriptedEngine(INFO, STARTED, [1], END, error=WorkerFailed("died"))
    reply = CollectedReply()
    with pytest.raises(WorkerFailed):
        await engine.generate(REQUEST, Context("r"), reply)
    assert (reply.ids, reply.end) == ([1], None)


async def test_an_endless_script_can_be_cancelled() -> None:
    engine, reply = (
        ScriptedEngine(INFO, STARTED, [1], END, endless=True),
        CollectedReply(token_limit=9),
    )
    async with BackgroundTasks() as tasks:
        tasks.start(engine.generate(REQUEST, Context("r"), reply))
        while not reply.ids:
            await tasks.start(engine.start())
    assert engine.cancelled.is_set()
