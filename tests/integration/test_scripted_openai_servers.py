"""Servers with an OpenAI API that answer as a test says: their ids, errors and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.conftest import free_port
from tests.support.fake_openai_server import (
    KEY,
    PROMPT,
    FakeServer,
    chunk,
    engine_at,
    events,
    make_engine,
    models,
    request,
    served,
)
from tests.support.kv_event_publisher import KvEventPublisher

from dynamo.core.context import Context
from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    Forbidden,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    Unauthorized,
    WorkerFailed,
)
from dynamo.core.values import StopConditions
from dynamo.inference.openai_server import engine as engine_module
from dynamo.inference.openai_server.factory import parse_kv_events
from dynamo.testing.fakes import CollectedReply
from dynamo_conformance.engines import ENGINE_CONTEXT


async def test_token_ids_of_vllm_and_its_stop_token(tiny_model: Path) -> None:
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        end = {
            "choices": [],
            "usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 32}},
        }
        body = events(chunk([5, 6]), chunk([7, 2], "stop"), end) + b"data: [DONE]\n\n"
        fake.answers["/v1/completions"] = (200, "", body)
        stops = StopConditions(max_tokens=9, stop_token_ids=(2,))
        reply = CollectedReply()
        await engine.generate(replace(request(), stops=stops), ENGINE_CONTEXT, reply)
        assert reply.ids == [5, 6, 7]
        assert reply.end is not None
        assert (reply.end.completion_tokens, reply.end.stop_token) == (4, 2)
        assert reply.end.cached_tokens == 32


async def test_kv_events_of_a_server_are_published(tiny_model: Path) -> None:
    port = free_port()
    publisher = KvEventPublisher(f"tcp://*:{port}")
    async with served() as fake:
        endpoint = parse_kv_events(f"tcp://127.0.0.1:{port}")
        engine = make_engine(fake.url, tiny_model, kv_events=endpoint)
        info = await engine.start()
        stored = asyncio.Event()
        (rank,) = engine.ranks
        rank.on_kv_events(lambda _: stored.set())
        block = {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": list(PROMPT[:32]),
            "block_size": 16,
        }
        publisher.publish(msgspec.msgpack.encode([0.0, [block], None]))
        await stored.wait()
        (event,) = rank.snapshot_kv_events()
        assert info.kv_events
        assert len(event.hashes) == 2
        await engine.stop()
    publisher.stop()


def test_an_address_of_kv_events_is_checked() -> None:
    assert parse_kv_events("tcp://a:1/2").replay == "tcp://a:2"
    with pytest.raises(ConfigError, match="no address of KV events"):
        parse_kv_events("ipc:///x")


Change = Callable[[FakeServer], None]


def answer_completions(status: int, body: bytes, headers: str = "") -> Change:
    def change(fake: FakeServer) -> None:
        fake.answers["/v1/completions"] = (status, headers, body)

    return change


def break_off(fake: FakeServer) -> None:
    answer_completions(200, events(chunk([5])))(fake)
    fake.breaks_off = True


def stream_error(error: object) -> Change:
    return answer_completions(200, events(chunk([5]), {"error": error}))


def end_by(reason: str) -> bytes:
    return events(chunk([5], reason)) + b"data: [DONE]\n\n"


async def test_an_answer_that_is_complete_survives_its_connection(tiny_model: Path) -> None:
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        answer_completions(200, end_by("length"))(fake)
        fake.breaks_off = True
        reply = CollectedReply()
        await engine.generate(request(), ENGINE_CONTEXT, reply)
        assert reply.ids == [5]
        assert reply.end is not None
        assert reply.end.reason == "length"


async def test_the_prompt_of_an_answer_without_tokens_is_load(tiny_model: Path) -> None:
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        fake.hangs = True
        running = asyncio.create_task(engine.generate(request(), ENGINE_CONTEXT, CollectedReply()))
        while not (load := engine.report_load()).waiting:
            await asyncio.sleep(0)
        assert (load.running, load.waiting, load.prefill_tokens) == (0, 1, len(PROMPT))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert engine.report_load().waiting == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (answer_completions(200, b"<html>\n"), WorkerFailed, "before it was complete"),
        (answer_completions(200, b"data: {broken\n\n"), WorkerFailed, "no completion"),
        (answer_completions(200, events({"choices": "x"})), WorkerFailed, "no completion"),
        (answer_completions(200, events(chunk([5]))), WorkerFailed, "before it was complete"),
        (answer_completions(200, b"data: [DONE]\n\n"), WorkerFailed, "without a finish_reason"),
        (answer_completions(500, b"oops"), WorkerFailed, "500: oops"),
        (answer_completions(429, b"", "retry-after: 7\r\n"), Overloaded, "overloaded"),
        (answer_completions(503, b"{}", "retry-after: 7\r\n"), Overloaded, "overloaded"),
        (answer_completions(402, b"no credit"), InvalidRequest, "402.*: no credit"),
        (answer_completions(404, b"no route"), InvalidRequest, "404.*: no route"),
        (answer_completions(408, b""), Overloaded, "408"),
        (answer_completions(401, b"who?"), WorkerFailed, r"401.*: who\?; .* \(engine.url_key\)"),
        (answer_completions(403, b"no"), WorkerFailed, r"403.*: no; .* \(engine.url_key\)"),
        (stream_error({"message": "no", "code": 401}), WorkerFailed, "engine.url_key"),
        (break_off, WorkerFailed, "closed during an answer"),
        (stream_error({"message": "too many", "code": 429}), Overloaded, "too many"),
        (stream_error({"message": "bad top_p", "code": 400}), InvalidRequest, "bad top_p"),
        (stream_error({"message": "oops", "code": "x"}), WorkerFailed, "500: .*oops"),
        (answer_completions(200, end_by("abort")), WorkerFailed, "finish_reason 'abort'"),
        (answer_completions(200, end_by("error")), WorkerFailed, "finish_reason 'error'"),
    ],
)
async def test_what_a_bad_server_says_is_a_failed_worker(
    tiny_model: Path, change: Change, error: type[Exception], message: str
) -> None:
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        change(fake)
        with pytest.raises(error, match=message) as failed:
            await engine.generate(request(), ENGINE_CONTEXT, CollectedReply())
        if isinstance(failed.value, Overloaded) and message == "overloaded":
            assert failed.value.retry_after_s == 7
        assert engine.report_load().running == 0


@pytest.mark.parametrize("status", [200, 400, 401, 403, 429, 500])
async def test_keys_that_a_server_sends_back_are_not_shown(tiny_model: Path, status: int) -> None:
    caller = "a-key-of-the-caller"
    reflected = f"{'x' * 290} {KEY} and {caller}"
    for change in (
        answer_completions(status, reflected.encode()),
        answer_completions(status, msgspec.json.encode({"error": {"message": reflected}})),
        stream_error({"message": reflected, "code": status}),
        answer_completions(200, b"data: " + reflected.encode() + b"\n\n"),
    ):
        async with served() as fake, engine_at(fake, tiny_model) as engine:
            change(fake)
            with pytest.raises(DynamoError) as failed:
                await engine.generate(request(), ENGINE_CONTEXT, CollectedReply())
            assert KEY[:4] not in failed.value.message
            answer_completions(status, f"not {caller}".encode())(fake)
            context = replace(ENGINE_CONTEXT, api_key=caller)
            with pytest.raises(DynamoError) as failed:
                await engine.generate(request(), context, CollectedReply())
            assert caller not in failed.value.message


@pytest.mark.parametrize(("status", "error"), [(401, Unauthorized), (403, Forbidden)])
@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("passed", [True, False])
async def test_a_refused_or_missing_key_of_a_caller_is_the_callers_error(
    tiny_model: Path, status: int, error: type[DynamoError], in_stream: bool, passed: bool
) -> None:
    refusal = {"message": "wrong key", "code": status}
    change = stream_error(refusal) if in_stream else answer_completions(status, b"wrong key")
    context = replace(ENGINE_CONTEXT, api_key="theirs") if passed else ENGINE_CONTEXT
    async with served() as fake:
        engine = make_engine(fake.url, tiny_model, key=KEY if passed else "")
        await engine.start()
        change(fake)
        with pytest.raises(error, match=f"the key \\({status}\\): wrong key") as refused:
            await engine.generate(request(), context, CollectedReply())
        assert ("--pass-api-key" in refused.value.hint) == (not passed)
        assert engine.failure is None
        await engine.stop()


async def test_a_server_that_breaks_off_while_it_tokenises_is_asked_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RETRY_S", 0.0)
    compared = []

    async def check_tokenizer(*_: object) -> bool:
        compared.append(True)
        if len(compared) < 3:
            raise ConnectionError("closed")
        return True

    monkeypatch.setattr(engine_module, "check_tokenizer", check_tokenizer)
    async with served() as fake, engine_at(fake, tiny_model):
        assert len(compared) == 3


@pytest.mark.parametrize("status", [404, 429, 503])
async def test_a_server_that_loads_its_model_is_waited_for(
    tiny_model: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RETRY_S", 0.0)
    async with served() as fake:
        fake.answers["/v1/models"] = (status, "", b"")
        engine = make_engine(fake.url, tiny_model)
        starting = asyncio.create_task(engine.start())
        while fake.requests.count("/v1/models") < 3:
            await asyncio.sleep(0)
        fake.answers["/v1/models"] = (200, "", models("m"))
        assert (await starting).engine == "openai:vllm"
        await engine.stop()


@pytest.mark.parametrize("status", [301, 404, 405])
async def test_a_url_that_has_no_list_of_models_is_wrong(
    tiny_model: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RETRY_S", 0.0)
    monkeypatch.setattr(engine_module, "LOADING_TIMEOUT_S", 0.05)
    async with served() as fake:
        fake.answers["/v1/models"] = (status, "", b"")
        with pytest.raises(ConfigError, match=f"is no OpenAI API: .* answers {status}"):
            await make_engine(fake.url, tiny_model).start()


async def test_another_tokenizer_is_another_model(tiny_model: Path) -> None:
    async with served() as fake:
        fake.answers["/tokenize"] = (200, "", b'{"tokens": [1, 2, 3]}')
        with pytest.raises(ModelUnavailable, match="tokenizer is not that of the model"):
            await make_engine(fake.url, tiny_model).start()
        engine = make_engine(fake.url, tiny_model, model="n")
        with pytest.raises(ConfigError, match="no model 'n'"):
            await engine.start()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fake: setattr(fake, "hangs", True), "no answer|closed"),
        (lambda fake: fake.answers.update({"/health": (500, "", b"")}), "answers 500"),
        (
            lambda fake: fake.answers.update({"/v1/models": (200, "", models("other"))}),
            "changed its model from m to other",
        ),
    ],
)
async def test_a_server_that_hangs_or_changes_its_model_is_given_up(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 2.0)
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        given_up = asyncio.Event()
        engine.on_failure(given_up.set)
        monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.2)
        answer_completions(500, b"")(fake)
        change(fake)
        running = asyncio.create_task(engine.generate(request(), ENGINE_CONTEXT, CollectedReply()))
        await given_up.wait()
        with pytest.raises(WorkerFailed):
            await running
        assert engine.failure is not None
        with pytest.raises(WorkerFailed, match=message) as failed:
            await engine.generate(request(), ENGINE_CONTEXT, CollectedReply())
        assert failed.value is not engine.failure


@pytest.mark.parametrize(
    ("health", "list_of_models"),
    [
        (302, 200),
        (401, 200),
        (403, 200),
        (404, 200),
        (405, 200),
        (429, 200),
        (429, 429),
        (404, 429),
    ],
)
async def test_a_gateway_without_health_or_with_a_limit_of_the_rate_is_alive(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, health: int, list_of_models: int
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_INTERVAL_S", 0.0)
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        fake.answers["/health"] = (health, "", b"")
        fake.answers["/v1/models"] = (list_of_models, "", models("m"))
        fake.requests.clear()
        while fake.requests.count("/health") <= 2 * engine_module.MAX_HEALTH_FAILURES:
            assert engine.failure is None
            await asyncio.sleep(0)
        assert engine.failure is None
        if health != 429:
            assert fake.requests.count("/v1/models") >= engine_module.MAX_HEALTH_FAILURES


async def test_failures_between_which_a_server_limits_the_rate_are_not_in_a_row(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_INTERVAL_S", 0.0)
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        fake.requests.clear()
        while (checks := fake.requests.count("/health")) < 12:
            fake.answers["/health"] = (404 if checks % 3 == 2 else 500, "", b"")
            fake.answers["/v1/models"] = (429, "", b"")
            assert engine.failure is None
            await asyncio.sleep(0)


async def test_a_server_gets_the_trace_of_a_request(tiny_model: Path) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    context = Context("r", trace=trace, metadata={"tracestate": "v=1"})
    async with served() as fake, engine_at(fake, tiny_model) as engine:
        answer_completions(400, b"{}")(fake)
        fake.headers.clear()
        with pytest.raises(InvalidRequest):
            await engine.generate(request(), context, CollectedReply())
        assert f"traceparent: {trace}\r\n".encode() in fake.headers
        assert b"tracestate: v=1\r\n" in fake.headers
