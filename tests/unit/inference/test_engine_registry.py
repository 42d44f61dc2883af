"""The registry of engines and the echo engine."""

from __future__ import annotations

import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from dynamo.core.plugins import ENGINES
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.echo import EchoEngine
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.models.resolve import resolve_model

CONTEXT = Context("r")


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        ENGINES.check("mok")
    assert "mock" in caught.value.hint


async def test_the_mock_generates_ids_of_the_model_s_tokenizer(tiny_model, make_request):
    files = await resolve_model(str(tiny_model))
    settings = Settings(engine=EngineSettings(kind="mock", speedup_ratio=1e6))
    engine = await open_engine(
        "mock", EngineInputs(settings, files.build_card(), files, SystemClock())
    )
    info = await engine.start()
    assert (info.num_blocks, info.max_num_seqs, info.max_num_batched_tokens) == (16384, 256, 8192)
    reply = RecordingReply()
    await engine.generate(make_request([7, 8, 9], max_tokens=50), CONTEXT, reply)
    assert len(reply.ids) == 50
    assert min(reply.ids) > 2  # never a special token
    await engine.stop()


async def open_probe(inputs: EngineInputs) -> EchoEngine:
    return EchoEngine(context_tokens=inputs.memory_bytes)


async def test_ranks_share_the_memory(tiny_model, monkeypatch):
    monkeypatch.setitem(ENGINES.builtin, "probe", f"{__name__}:open_probe")
    files = await resolve_model(str(tiny_model))
    settings = Settings(engine=EngineSettings(kind="probe", data_parallel_size=2))
    inputs = EngineInputs(settings, files.build_card(), files, SystemClock(), memory_bytes=1000)
    engine = await open_engine("probe", inputs)
    info = await engine.start()
    assert (info.context_tokens, info.data_parallel) == (500, 2)


async def test_echo_repeats_the_prompt(make_request):
    engine = EchoEngine(context_tokens=100)
    await engine.start()
    reply = RecordingReply()
    await engine.generate(make_request([5, 6, 7], max_tokens=10), CONTEXT, reply)
    assert (reply.ids, reply.end.reason) == ([5, 6, 7], "stop")
    reply = RecordingReply()
    await engine.generate(make_request([5, 6, 7], max_tokens=2), CONTEXT, reply)
    assert (reply.ids, reply.end.reason) == ([5, 6], "length")
    reply = RecordingReply()
    resumed = make_request([5, 6, 7, 5], resumed=1, max_tokens=9)
    await engine.generate(resumed, CONTEXT, reply)
    assert (reply.ids, reply.end.reason) == ([6, 7], "stop")
    assert engine.report_load().running == 0


async def test_echo_refuses_empty_and_too_long_prompts(make_request):
    engine = EchoEngine(context_tokens=3)
    with pytest.raises(ContextLengthExceeded):
        await engine.generate(make_request([5, 6, 7]), CONTEXT, RecordingReply())
    with pytest.raises(InvalidRequest):
        await engine.generate(make_request([]), CONTEXT, RecordingReply())
