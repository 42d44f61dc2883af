"""The adapter of SGLang: arguments, translation, faults."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.external_inputs import install_module, make_inputs
from tests.support.fake_sglang import FakeSglang

from dynamo.core.errors import ConfigError, InvalidRequest, ModelUnavailable, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import Finish, SamplingParams, StopConditions, StructuredOutput
from dynamo.inference.sglang.engine import SglangEngine, effective_arguments
from dynamo_conformance.engines import (
    ENGINE_CONTEXT,
    OrderCheckingReply,
    assert_idle,
    generate_reply,
    make_request,
)

Start = Callable[..., Awaitable[tuple[SglangEngine, FakeSglang]]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`await start(max_num_seqs=..., args={...})` returns a started engine and its fake."""
    install_module(monkeypatch, "sglang", Engine=FakeSglang)
    engines = []

    async def start(**settings: Any) -> tuple[SglangEngine, FakeSglang]:
        engine = SglangEngine(make_inputs("sglang", tmp_path, **settings))
        engines.append(engine)
        await engine.start()
        return engine, FakeSglang.started[-1]

    yield start
    for engine in engines:
        await engine.stop()


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_arguments(start: Start, tmp_path: Path) -> None:
    engine, fake = await start(max_num_seqs=7, args={"enable_lora": True})
    arguments = fake.arguments
    assert arguments["model_path"] == str(tmp_path)
    assert arguments["page_size"] == 4
    events = json.loads(arguments["kv_events_config"])
    assert events["publisher"] == "zmq"
    assert events["endpoint"].startswith("tcp://127.0.0.1:")
    info = engine._info
    assert (info.num_blocks, info.max_num_seqs, info.context_tokens) == (64, 7, 90)
    assert info.features == ("logprobs", "logit_bias", "extra", "structured", "adapters")


async def test_limits_are_those_in_effect(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = {"disable_radix_cache": True}
    monkeypatch.setattr(FakeSglang, "resolution", decided)
    engine, fake = await start()
    info = engine._info
    assert (info.prefix_caching, info.kv_events) == (False, False)
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (48, 2048)
    assert fake.server_args.disable_radix_cache is False
    assert (info.sampling["top_p"], info.sampling["temperature"]) == (0.75, 1.0)


def test_arguments_of_older_versions_are_in_effect_as_they_stand() -> None:
    server = SimpleNamespace(disable_radix_cache=True)
    assert effective_arguments(server)["disable_radix_cache"] is True


async def test_start_errors(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SGLang refuses its arguments"):
        await start(args={"wrong": 1})
    missing = SglangEngine(make_inputs("sglang", tmp_path / "missing"))
    with pytest.raises(ModelUnavailable, match="missing is not one"):
        await missing.start()


async def test_stop_during_a_start_kills_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def load(model_path: str, **arguments: Any) -> None:
        children.append(subprocess.Popen(["sleep", "60"]))
        raise RuntimeError(f"a scheduler ended: {children[0].wait()}")

    install_module(monkeypatch, "sglang", Engine=load)
    engine = SglangEngine(make_inputs("sglang", tmp_path))
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.start())
        await wait_until(lambda: bool(children))
        call.cancel()
        await asyncio.wait([call])
    assert children[0].returncode == -signal.SIGKILL


async def test_sampling_parameters(start: Start) -> None:
    engine, fake = await start()
    request = replace(
        make_request(tokens=3),
        sampling=SamplingParams(temperature=0.5, top_k=0, min_p=0.1, logit_bias={5: 1.5}, seed=9),
        stops=StopConditions(max_tokens=3, min_tokens=2, stop_token_ids=(7,)),
        structured=StructuredOutput("choice", '["yes", "no"]'),
        salt="acme",
        adapter="lora-a",
        extra={"no_stop_trim": True},
    )
    await generate_reply(engine, request)
    sent = fake.requests[0]
    params = sent["sampling_params"]
    assert (sent["cache_salt"], sent["lora_path"]) == ("acme", "lora-a")
    assert (params["top_k"], params["min_p"], params["logit_bias"]) == (-1, 0.1, {"5": 1.5})
    assert (params["min_new_tokens"], params["stop_token_ids"]) == (2, [7])
    assert json.loads(params["json_schema"]) == {"enum": ["yes", "no"]}
    assert params["no_stop_trim"] is True
    assert "sampling_seed" not in params
    for name in ("n", "max_new_tokens", "sampling_seed"):
        with pytest.raises(InvalidRequest, match=f"{name} is set by dynamo"):
            await generate_reply(engine, replace(make_request(), extra={name: 1}))


async def test_stop_token_is_reported_and_not_sent(start: Start) -> None:
    engine, _ = await start()
    whole = (await generate_reply(engine, make_request(tokens=4))).ids
    stops = StopConditions(max_tokens=4, stop_token_ids=(whole[2],), ignore_eos=True)
    reply = await generate_reply(engine, replace(make_request(), stops=stops))
    cut = whole.index(whole[2])
    assert reply.ids == whole[:cut]
    assert reply.end == Finish("stop", cut + 1, whole[2])


@pytest.mark.parametrize("incremental", [True, False])
async def test_logprobs(start: Start, incremental: bool) -> None:
    engine, _ = await start(args={"incremental_streaming_output": incremental})
    reply = await generate_reply(engine, replace(make_request(tokens=3), top_logprobs=1))
    (entries,) = zip(*reply.extras, strict=True)
    assert [entry.token for entry in entries] == reply.ids
    assert {(entry.logprob, len(entry.top)) for entry in entries} == {(-0.5, 1)}


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        ({"type": "abort", "message": "grammar", "status_code": 400}, InvalidRequest, "grammar"),
        ({"type": "abort", "message": "no memory"}, WorkerFailed, "no memory"),
        (ValueError("routed_dp_rank"), InvalidRequest, "routed_dp_rank"),
        (RuntimeError("boom"), WorkerFailed, "boom"),
    ],
)
async def test_failed_requests(start: Start, failure: Any, error: Any, text: str) -> None:
    engine, fake = await start()
    fake.next_failure = failure
    with pytest.raises(error, match=text):
        await generate_reply(engine, make_request())
    await assert_idle(engine)
    assert len((await generate_reply(engine, make_request(tokens=2))).ids) == 2


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_cancelled_requests_leave_the_engine(start: Start, turns: int) -> None:
    engine, fake = await start()
    async with BackgroundTasks() as tasks:
        call = tasks.start(generate_reply(engine, make_request(tokens=40)))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    await engine._thread.run(lambda: asyncio.sleep(0.02))
    assert fake.running == {}
    assert len((await generate_reply(engine, make_request(tokens=2))).ids) == 2


async def test_dead_process_fails_the_engine(start: Start) -> None:
    engine, fake = await start()
    failures = []
    engine.on_failure(lambda: failures.append(engine.failure))
    reply = OrderCheckingReply()
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.generate(make_request(tokens=45), ENGINE_CONTEXT, reply))
        await reply.first_token.wait()
        fake.child.kill()
        engine.fail("a process of SGLang has died")
        with pytest.raises(WorkerFailed, match="has died"):
            await call
    assert len(failures) == 1
    with pytest.raises(WorkerFailed, match="has died"):
        await generate_reply(engine, make_request())


async def test_death_of_an_idle_engine_is_noticed(start: Start) -> None:
    engine, fake = await start()
    fake.child.kill()
    await wait_until(lambda: engine.failure is not None)
    assert "a process of SGLang has died" in engine.failure.message


async def test_prediction_equals_the_cached_tokens(start: Start) -> None:
    engine, fake = await start()
    view = engine.ranks[0]
    for number in range(60):
        prompt = [3 + (number * index) % 5 for index in range(10 + number % 30)]
        salt = ("", "acme")[number % 2]
        reader = view.reader
        expected = fake.publisher.count
        await wait_until(lambda: reader.counts["messages"] >= expected)  # noqa: B023
        await generate_reply(engine, replace(make_request(prompt, 3), salt=salt))
    assert +view.drift.counts == {"checked": 60}


async def test_a_view_whose_event_came_during_the_reset_is_left_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fake = await start()
    view, manager = engine.ranks[0], fake.tokenizer_manager
    await generate_reply(engine, make_request())
    await wait_until(lambda: len(view.blocks) > 0)
    flush, clears = manager.flush_cache, view.blocks.clears

    async def flush_while_another_rank_is_slow() -> Any:
        result = await flush()
        fake.was_reset = False
        fake.cache.reset()
        fake.publisher.publish(fake.cache.drain_payload())
        await wait_until(lambda: view.blocks.clears > clears)
        return result

    monkeypatch.setattr(manager, "flush_cache", flush_while_another_rank_is_slow)
    assert await engine.clear_blocks() > 0
    await generate_reply(engine, make_request())
    await wait_until(lambda: len(view.blocks) > 0)


async def test_ranks_without_own_addresses_are_predicted(start: Start) -> None:
    engine, _ = await start(data_parallel_size=2)
    assert len(engine.ranks) == 2
    assert "enable_dp_attention" in engine.ranks[1].kv_problem
    reply = await generate_reply(engine, replace(make_request(), rank=1))
    assert len(reply.ids) == 8


async def test_requests_of_ranks_name_their_rank(start: Start) -> None:
    engine, fake = await start(data_parallel_size=2, args={"enable_dp_attention": True})
    await generate_reply(engine, replace(make_request(), rank=1))
    assert fake.requests[0]["routed_dp_rank"] == 1
    assert engine.ranks[1].kv_problem == ""
