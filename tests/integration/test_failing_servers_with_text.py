"""Servers without a tokenizer at hand that are idle, slow, dead, or break off."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from tests.integration.test_servers_with_text import (
    CONTEXT,
    DONE,
    MESSAGES,
    RecordedText,
    card,
    delta,
    models_of,
    processor_at,
)
from tests.support.fake_openai_server import events, served

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import UpstreamFailed, WorkerFailed
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import ChatRequest
from dynamo.inference.openai_server import engine as engine_module
from dynamo.inference.openai_server import streamed_answer
from dynamo.inference.openai_server.engine import OpenAIServerEngine
from dynamo.inference.probe import answer_probe
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.processor import TextProcessor
from dynamo.telemetry import Registry


@pytest.mark.parametrize("health", [200, 401, 404, 429])
@pytest.mark.parametrize("kind", ["someone", "vllm"])
async def test_an_idle_server_answers_probes_by_its_health(kind: str, health: int) -> None:
    async with served() as fake:
        fake.answers["/v1/models"] = (200, "", models_of(kind))
        fake.answers["/health"] = (health, "", b"")
        engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
        await engine.start()
        assert (await answer_probe(engine)).requests == 0
        assert {"/v1/completions", "/v1/chat/completions"}.isdisjoint(fake.requests)
        fake.answers["/health"] = (500, "", b"")
        with pytest.raises(WorkerFailed, match="answers 500"):
            await answer_probe(engine)
        await engine.stop()
        with pytest.raises(WorkerFailed, match="stopped"):
            await answer_probe(engine)


class HeldText(RecordedText):
    """A reply of whose text the client has nothing until it ends."""

    def restart(self, choice: int) -> bool:
        del choice
        self.parts.clear()
        return True


@pytest.mark.parametrize("held", [True, False])
async def test_an_answer_that_is_not_streamed_is_repeated_when_its_server_breaks_off(
    held: bool,
) -> None:
    async with served() as fake:
        fake.answers["/v1/chat/completions"] = (200, "", events(delta("bad")))
        engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
        await engine.start()

        async def send(request: Any, context: Context, reply: Any) -> None:
            try:
                await engine.generate(request, context, reply)
            finally:
                whole = events(delta("good"), delta(None, "content_filter")) + DONE
                fake.answers["/v1/chat/completions"] = (200, "", whole)

        migration = Migration(SystemClock(), Random(1), Registry())

        async def migrate(request: Any, context: Context, reply: Any) -> None:
            await migration.send(request, context, reply, send)

        reply = (HeldText if held else RecordedText)()
        chat = TextProcessor(card(), migrate, SamplingSettings()).chat
        if held:
            await chat(ChatRequest("m", MESSAGES), CONTEXT, reply)
            assert reply.parts == ["good"]
            assert [end.reason for end in reply.ends] == ["content_filter"]
        else:
            with pytest.raises(WorkerFailed, match="cannot continue at another worker"):
                await chat(ChatRequest("m", MESSAGES), CONTEXT, reply)
        await engine.stop()


async def test_a_server_that_is_dead_is_named() -> None:
    async with served() as fake:
        engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
        await engine.start()
    await fake.close_connections()
    processor = TextProcessor(card(), engine.generate, SamplingSettings())
    with pytest.raises(UpstreamFailed, match=fake.url):
        await processor.chat(ChatRequest("m", MESSAGES), CONTEXT, RecordedText())
    await engine.stop()


async def test_a_body_without_an_end_keeps_no_complete_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed_answer, "END_TIMEOUT_S", 0.0)
    async with served() as fake, processor_at(fake) as processor:
        for end in (b"", DONE):
            fake.answers["/v1/chat/completions"] = (200, "", events(delta("x", "stop")) + end)
            fake.missing_bytes = 100
            reply = RecordedText()
            await processor.chat(ChatRequest("m", MESSAGES), CONTEXT, reply)
            assert reply.parts == ["x"]
            assert len(reply.ends) == 1


async def test_a_server_that_has_not_begun_an_answer_makes_progress_while_it_is_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_INTERVAL_S", 0.0)
    async with served() as fake:
        engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
        await engine.start()
        fake.hanging_path = "/v1/chat/completions"
        processor = TextProcessor(card(), engine.generate, SamplingSettings())
        chat = asyncio.create_task(
            processor.chat(ChatRequest("m", MESSAGES), CONTEXT, RecordedText())
        )
        while (await answer_probe(engine)).requests == 0:
            await asyncio.sleep(0)
        before = await answer_probe(engine)
        while (await answer_probe(engine)).steps == before.steps:
            await asyncio.sleep(0)
        chat.cancel()
        await asyncio.gather(chat, return_exceptions=True)
        await engine.stop()
