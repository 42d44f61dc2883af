"""The engine of a program's handler: parts of answers, ends, stops and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.common.backend.engine import BaseEngine, EngineConfig, LLMEngine
from dynamo.common.backend.worker import _generate as serve_request
from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, NotFound, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    StructuredOutput,
    TokenLogprobs,
)
from dynamo.inference.handler.engine import HandlerEngine
from dynamo.models.card import ModelCard
from dynamo.runtime import Context as CallContext
from dynamo.runtime.compatibility.errors import HttpError

CARD = ModelCard(("m",), context_tokens=100, vocab_size=9, tokenizer=None, eos_token_ids=(2,))
REQUEST = GenerateRequest(
    "r", "m", pack_ids([5, 6]), SamplingParams(), StopConditions(max_tokens=4)
)


async def answer(
    *items: Any, request: GenerateRequest = REQUEST, reply: RecordingReply | None = None
) -> RecordingReply:
    """Return the reply to a request whose handler yields `items`."""

    async def handler(body: Any, context: CallContext) -> AsyncIterator[Any]:
        for item in items:
            yield item

    reply = reply or RecordingReply()
    engine = HandlerEngine(handler, CARD, lambda text: pack_ids([len(text)]))  # type: ignore[arg-type]
    await engine.generate(request, Context("r"), reply)
    await engine.stop()
    return reply


@pytest.mark.parametrize(
    ("items", "ids", "end"),
    [
        ([{"token_ids": [7]}, {"token_ids": [8], "finish_reason": "stop"}], [7, 8], ("stop", 2)),
        ([{"token_ids": [7]}], [7], ("stop", 1)),
        ([{"token_ids": [7], "finish_reason": "length"}], [7], ("length", 1)),
        ([{"token_ids": [7, 8, 7]}, {"token_ids": [8, 7]}], [7, 8, 7, 8], ("length", 4)),
        ([{"token_ids": [7]}, {"token_ids": [8, 2, 8]}], [7, 8], ("stop", 3)),
        ([{"token_ids": [], "text": "abc", "finish_reason": "eos"}], [3], ("stop", 1)),
        ([{"token_ids": [], "finish_reason": "stop"}, {"token_ids": [7]}], [], ("stop", 0)),
    ],
)
async def test_parts_become_an_answer(
    items: list[Any], ids: list[int], end: tuple[str, int]
) -> None:
    reply = await answer(*items)
    assert reply.started is not None
    assert reply.started.prompt_tokens == 2
    assert reply.ids == ids
    assert isinstance(reply.end, Finish)
    assert (reply.end.reason, reply.end.completion_tokens) == end


async def test_stop_tokens_count_after_min_tokens_only() -> None:
    stops = StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=(8,), ignore_eos=True)
    request = msgspec.structs.replace(REQUEST, stops=stops)
    reply = await answer({"token_ids": [8, 2]}, {"token_ids": [8]}, request=request)
    assert reply.ids == [8, 2]
    assert reply.end == Finish("stop", 3, stop_token=8)


async def test_logprobs_of_the_handler_are_passed_on() -> None:
    top = [[{"rank": 1, "token_id": 8, "logprob": -0.5}]]
    item = {"token_ids": [7], "log_probs": [-1.0], "top_logprobs": top}
    assert (await answer(item)).extras == [TokenLogprobs(7, -1.0, ((8, -0.5),))]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (StructuredOutput("json_object"), {"json": {"type": "object"}}),
        (StructuredOutput("json_schema", '{"type": "null"}'), {"json": {"type": "null"}}),
        (StructuredOutput("choice", '["a"]'), {"choice": ["a"]}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (None, None),
    ],
)
async def test_a_handler_reads_the_request(form: StructuredOutput | None, expected: Any) -> None:
    bodies: list[Any] = []

    async def handler(body: Any) -> AsyncIterator[Any]:
        bodies.append(body)
        yield {"token_ids": [7], "finish_reason": "stop"}

    engine = HandlerEngine(lambda body, _: handler(body), CARD, pack_ids)  # type: ignore[arg-type, return-value]
    request = msgspec.structs.replace(REQUEST, structured=form, top_logprobs=1)
    await engine.generate(request, Context("r"), RecordingReply())
    (body,) = bodies
    assert (body["model"], body["token_ids"], body["eos_token_ids"]) == ("m", [5, 6], [2])
    assert body["stop_conditions"]["max_tokens"] == 4
    assert body["sampling_options"]["temperature"] == 0.7
    assert body["sampling_options"]["guided_decoding"] == expected
    assert body["output_options"]["logprobs"] == 1


class Endless:
    """A handler that yields for ever and records how it ends."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.ended = asyncio.Event()

    async def generate(self, body: Any, context: CallContext) -> AsyncIterator[Any]:
        try:
            while True:
                self.seen.append(context.is_stopped())
                yield {"token_ids": [7]}
                await asyncio.sleep(0)
        finally:
            self.ended.set()


@pytest.mark.parametrize("limit", [2, 1 << 30])
async def test_a_handler_sees_that_its_answer_is_over(limit: int) -> None:
    handler, reply = Endless(), RecordingReply(limit)
    engine = HandlerEngine(handler.generate, CARD, pack_ids)  # type: ignore[arg-type]
    await engine.generate(REQUEST, Context("r"), reply)
    async with asyncio.timeout(5):
        await handler.ended.wait()
    assert handler.seen[-1]
    assert not any(handler.seen[:-1])
    assert engine.report_load().running == 0


class AbortingEngine(LLMEngine):
    """A user's engine that yields for ever and records what is aborted."""

    def __init__(self) -> None:
        self.handler = Endless()
        self.aborted: list[str | None] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BaseEngine, Any]:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        raise NotImplementedError

    async def cleanup(self) -> None:
        pass

    def generate(self, request: Any, context: CallContext) -> Any:
        return self.handler.generate(request, context)

    async def abort(self, context: CallContext) -> None:
        self.aborted.append(context.id())


@pytest.mark.parametrize(("limit", "aborted"), [(2, ["r"]), (1 << 30, [])])
async def test_an_engine_aborts_what_was_left_and_no_complete_answer(
    limit: int, aborted: list[str]
) -> None:
    users, reply = AbortingEngine(), RecordingReply(limit)
    engine = HandlerEngine(partial(serve_request, users), CARD, pack_ids)  # type: ignore[arg-type]
    await engine.generate(REQUEST, Context("r"), reply)
    async with asyncio.timeout(5):
        await users.handler.ended.wait()
    await engine.stop()
    assert users.aborted == aborted


async def test_an_engine_that_ends_by_itself_aborts_what_was_left() -> None:
    class Attentive(AbortingEngine):
        async def generate(self, request: Any, context: CallContext) -> Any:
            context.kill()
            yield {}

    users = Attentive()
    async with aclosing(serve_request(users, {}, CallContext("r"))) as chunks:
        assert [chunk async for chunk in chunks] == [{}]
    assert users.aborted == ["r"]


async def test_a_handler_sees_that_its_request_was_cancelled() -> None:
    handler, reply = Endless(), RecordingReply()
    request = msgspec.structs.replace(REQUEST, stops=StopConditions(max_tokens=1 << 30))
    engine = HandlerEngine(handler.generate, CARD, pack_ids)  # type: ignore[arg-type]
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.generate(request, Context("r"), reply))
        await reply.first.wait()
        call.cancel()
        async with asyncio.timeout(5):
            await handler.ended.wait()
    assert handler.seen[-1]
    assert reply.end is None


async def test_a_stopped_engine_closes_its_handlers() -> None:
    ended = asyncio.Event()

    async def hang(body: Any, context: CallContext) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            ended.set()

    engine = HandlerEngine(hang, CARD, pack_ids)  # type: ignore[arg-type]
    async with BackgroundTasks() as tasks:
        call = tasks.start(engine.generate(REQUEST, Context("r"), RecordingReply()))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        await engine.stop()
    assert ended.is_set()
    with pytest.raises(WorkerFailed, match="stopped"):
        await engine.generate(REQUEST, Context("r"), RecordingReply())


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", "no part of an answer"),
        ({"token_ids": "a"}, "no part of an answer"),
        ({"token_ids": [1], "finish_reason": {"error": "broken"}}, "broken"),
        ({"token_ids": [1], "finish_reason": "tired"}, "tired"),
    ],
)
async def test_a_wrong_part_is_an_error(item: Any, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        await answer(item)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("no"), InvalidRequest),
        (HttpError(404, "no"), NotFound),
        (HttpError(418, "no"), InvalidRequest),
        (RuntimeError("no"), RuntimeError),
    ],
)
async def test_errors_of_a_handler_keep_their_meaning(
    raised: Exception, expected: type[Exception]
) -> None:
    async def handler(body: Any, context: CallContext) -> AsyncIterator[Any]:
        yield {"token_ids": [7]}
        raise raised

    engine = HandlerEngine(handler, CARD, pack_ids)  # type: ignore[arg-type]
    with pytest.raises(expected, match="no"):
        await engine.generate(REQUEST, Context("r"), RecordingReply())
    with pytest.raises(ValueError, match="status"):
        HttpError(1000, "no")
