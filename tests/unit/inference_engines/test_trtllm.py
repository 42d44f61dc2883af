"""The adapter of TensorRT-LLM: arguments, translation, faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support import fake_trtllm
from tests.support.external_inputs import make_inputs
from tests.support.fake_trtllm import FakeLlm

from dynamo.core.codec import pack_ids
from dynamo.core.errors import InvalidRequest, ModelUnavailable, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    BlocksCleared,
    Finish,
    KvEvent,
    SamplingParams,
    StopConditions,
    StructuredOutput,
)
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING
from dynamo.inference.trtllm import engine as trtllm_engine
from dynamo.inference.trtllm.engine import TrtllmEngine
from dynamo_conformance.engines import (
    ENGINE_CONTEXT,
    OrderCheckingReply,
    assert_idle,
    generate_reply,
    make_request,
)

Start = Callable[..., Awaitable[tuple[TrtllmEngine, FakeLlm]]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`await start(max_num_seqs=..., args={...})` returns a started engine and its fake."""
    fake_trtllm.install(monkeypatch)
    engines = []

    async def start(**settings: Any) -> tuple[TrtllmEngine, FakeLlm]:
        engine = TrtllmEngine(make_inputs("trtllm", tmp_path, **settings))
        engines.append(engine)
        await engine.start()
        return engine, FakeLlm.started[-1]

    yield start
    for engine in engines:
        await engine.stop()


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_arguments(start: Start, tmp_path: Path) -> None:
    arguments = {"guided_decoding_backend": "xgrammar", "kv_cache_config.max_tokens": 640}
    engine, fake = await start(max_num_seqs=7, args=arguments)
    assert fake.model == str(tmp_path)
    assert fake.arguments["max_batch_size"] == 7
    assert (fake.config.tokens_per_block, fake.config.max_tokens) == (4, 640)
    info = engine._info
    assert (info.num_blocks, info.context_tokens, info.data_parallel) == (64, 90, 1)
    assert info.features == ("logprobs", "extra", "structured")


async def test_wrong_arguments_are_refused(start: Start) -> None:
    with pytest.raises(ModelUnavailable, match="cannot start: wrong: Extra inputs"):
        await start(args={"wrong": 1})


async def test_sampling_parameters(start: Start) -> None:
    engine, fake = await start()
    stops = StopConditions(max_tokens=3, min_tokens=2, stop_token_ids=(7,))
    structured = StructuredOutput("json_object")
    request = replace(
        make_request(),
        stops=stops,
        structured=structured,
        extra={"top_p_min": 0.5},
        sampling=greedy(),
    )
    await generate_reply(engine, request)
    sent = fake.requests[0]["sampling"]
    assert (sent.top_k, sent.temperature, sent.max_tokens, sent.min_tokens) == (1, None, 3, 2)
    assert (sent.end_id, sent.stop_token_ids, sent.detokenize, sent.top_p_min) == (
        2,
        [7],
        False,
        0.5,
    )
    assert sent.guided_decoding.json_object is True
    with pytest.raises(InvalidRequest, match="no_such"):
        await generate_reply(engine, replace(make_request(), extra={"no_such": 1}))
    for name in ("n", "max_tokens", "end_id"):
        with pytest.raises(InvalidRequest, match=f"{name} is set by dynamo"):
            await generate_reply(engine, replace(make_request(), extra={name: 1}))


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0)


async def test_stop_tokens_are_reported_and_not_sent(start: Start) -> None:
    engine, _ = await start()
    whole = (await generate_reply(engine, make_request(tokens=4))).ids
    cut = whole.index(whole[2])
    stops = StopConditions(max_tokens=4, stop_token_ids=(whole[2],), ignore_eos=True)
    reply = await generate_reply(engine, replace(make_request(), stops=stops))
    assert (reply.ids, reply.end) == (whole[:cut], Finish("stop", cut + 1, whole[2]))
    engine._translator._eos_token_ids = [whole[2]]
    ended = await generate_reply(engine, replace(make_request(), stops=StopConditions(4)))
    assert (ended.ids, ended.end) == (reply.ids, reply.end)


async def test_logprobs(start: Start) -> None:
    engine, fake = await start()
    reply = await generate_reply(engine, replace(make_request(tokens=3), top_logprobs=0))
    (entries,) = zip(*reply.extras, strict=True)
    assert [entry.token for entry in entries] == reply.ids
    assert {(entry.logprob, entry.top) for entry in entries} == {(-0.5, ())}
    assert fake.requests[0]["sampling"].logprobs == 1


@pytest.mark.parametrize(
    ("failure", "error"), [(ValueError("bad"), InvalidRequest), (RuntimeError("bad"), WorkerFailed)]
)
async def test_failed_requests(start: Start, failure: Exception, error: Any) -> None:
    engine, fake = await start()
    fake.next_failure = failure
    with pytest.raises(error, match="bad"):
        await generate_reply(engine, make_request())
    await assert_idle(engine)
    assert len((await generate_reply(engine, make_request(tokens=2))).ids) == 2
    fake.refusal = failure
    with pytest.raises(error, match="bad"):
        await generate_reply(engine, make_request())
    await assert_idle(engine)


async def test_cancelled_request_is_aborted(start: Start) -> None:
    engine, fake = await start()
    reply = OrderCheckingReply()
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.generate(make_request(tokens=45), ENGINE_CONTEXT, reply))
        await reply.first_token.wait()
        call.cancel()
        await asyncio.wait([call])
    assert len(fake.abandoned) == 1
    await generate_reply(engine, make_request(tokens=2))
    assert len(fake.abandoned) == 1


async def test_dead_executor_fails_the_engine_and_waiting_requests(start: Start) -> None:
    engine, fake = await start()
    failures = []
    engine.on_failure(lambda: failures.append(engine.failure))
    reply = OrderCheckingReply()
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.generate(make_request(tokens=45), ENGINE_CONTEXT, reply))
        await reply.first_token.wait()
        fake.shut_down = True
        with pytest.raises(WorkerFailed, match="TensorRT-LLM has died"):
            await call
    assert len(failures) == 1


@pytest.mark.parametrize("asserts", [True, False], ids=["1.0", "1.2"])
async def test_events_are_polled_after_a_request(
    start: Start, monkeypatch: pytest.MonkeyPatch, asserts: bool
) -> None:
    monkeypatch.setattr(FakeLlm, "asserts", asserts)
    engine, fake = await start()
    assert (engine._info.num_blocks, len(fake.calls)) == (64, 1)
    assert fake.calls[0]["sampling"].max_tokens == 1


async def test_a_dead_worker_fails_an_idle_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fake = await start()
    failed = asyncio.Event()
    engine.on_failure(failed.set)
    monkeypatch.setattr(trtllm_engine, "CANARY_TIMEOUT_S", 0.05)
    fake.kill_worker()
    await failed.wait()
    assert "a process of TensorRT-LLM has died" in engine.failure.message


async def test_a_helper_that_ends_harms_nobody(start: Start) -> None:
    engine, fake = await start()
    fake.helper.kill()
    fake.helper.wait()
    await wait_until(lambda: len(fake.requests) == 1)
    assert len((await generate_reply(engine, make_request(tokens=2))).ids) == 2
    assert engine.failure is None


async def test_sampling_that_nobody_names_is_the_models_or_neutral(start: Start) -> None:
    engine, _ = await start()
    assert engine._info.sampling == NEUTRAL_SAMPLING


async def test_prediction_equals_the_cached_tokens(start: Start) -> None:
    engine, fake = await start()
    view = engine.ranks[0]
    for number in range(30):
        prompt = [3 + (number * index) % 5 for index in range(10 + number % 30)]
        await wait_until(
            lambda: view.blocks.predict(pack_ids(prompt)) == fake.cache.cached_tokens(prompt)  # noqa: B023
        )
        await generate_reply(engine, make_request(prompt, 3))
    assert view.drift.counts["checked"] == 30
    assert view.drift.counts["too_high"] == 0


async def test_lost_events_empty_the_view(start: Start) -> None:
    engine, fake = await start()
    view, events = engine.ranks[0], []
    engine.ranks[0].on_kv_events(events.extend)
    await generate_reply(engine, make_request())
    await wait_until(lambda: len(view.blocks) > 0)
    fake.lose_event()
    await generate_reply(engine, make_request([*range(50, 80)]))
    await wait_until(lambda: BlocksCleared() in events)


async def test_salted_prompts_end_the_view(start: Start) -> None:
    engine, fake = await start()
    events: list[KvEvent] = []
    engine.ranks[0].on_kv_events(events.extend)
    await generate_reply(engine, replace(make_request(), salt="acme"))
    assert fake.requests[0]["cache_salt"] == "acme"
    assert "do not tell the salt" in engine.ranks[0].kv_problem
    assert events[-1] == BlocksCleared()


async def test_attention_ranks(start: Start) -> None:
    engine, fake = await start(tensor_parallel_size=2, args={"enable_attention_dp": True})
    assert len(engine.ranks) == 2
    await generate_reply(engine, replace(make_request(), rank=1))
    scheduling = fake.requests[0]["scheduling_params"]
    assert (scheduling.attention_dp_rank, scheduling.attention_dp_relax) == (1, False)


async def test_attention_ranks_without_a_size_are_one(start: Start) -> None:
    engine, _ = await start(args={"enable_attention_dp": True})
    assert len(engine.ranks) == 1
