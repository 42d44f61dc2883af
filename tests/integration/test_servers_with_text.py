"""Servers with an OpenAI API in front of which no tokenizer is at hand: chat goes as chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.fake_openai_server import FakeServer, events, served

from dynamo.communication.http.client import HttpClient
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import (
    DynamoError,
    InvalidRequest,
    Unsupported,
    WorkerFailed,
)
from dynamo.core.features import required_features
from dynamo.core.reply import SendRequest
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    CallMode,
    ChatRequest,
    CompletionRequest,
    DecodedTokenLogprob,
    ReasoningDelta,
    SamplingOverrides,
    TextFinish,
    TextOptions,
    TextReply,
)
from dynamo.core.values import Started, StructuredOutput
from dynamo.inference.openai_server.engine import OpenAIServerEngine
from dynamo.inference.openai_server.factory import open_text_engine
from dynamo.models.card import ModelCard
from dynamo.scheduling.processor import TextProcessor

CONTEXT = Context("r")
MESSAGES = ({"role": "user", "content": "hi"},)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
DONE = b"data: [DONE]\n\n"
USAGE = {
    "completion_tokens": 9,
    "prompt_tokens": 40,
    "prompt_tokens_details": {"cached_tokens": 32},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


class RecordedText(TextReply):
    """Collects everything in order."""

    def __init__(self) -> None:
        self.parts: list[str | AnswerEvent] = []
        self.logprobs: list[DecodedTokenLogprob] = []
        self.ends: list[TextFinish] = []

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        assert prompt_tokens == 0
        assert repeated_bytes == 0

    def begin(self, choice: int, started: Started) -> None:
        pass

    def text(self, choice: int, delta: str, logprobs: Any = None) -> bool:
        del choice
        self.parts.append(delta)
        self.logprobs += logprobs or ()
        return True

    def event(self, choice: int, event: AnswerEvent) -> bool:
        del choice
        self.parts.append(event)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        del choice
        self.ends.append(end)


def card(**changes: Any) -> ModelCard:
    return replace(ModelCard(("m",), 512, 0, None), **changes)


@asynccontextmanager
async def processor_at(fake: FakeServer) -> AsyncIterator[TextProcessor]:
    engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
    info = await engine.start()
    send: SendRequest = engine.generate
    assert {"text", "logprobs", "structured"} <= set(info.features)
    try:
        yield TextProcessor(card(), send, SamplingSettings())
    finally:
        await engine.stop()


def delta(content: str | None = None, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content, **fields}, "finish_reason": reason}]}


def models_of(kind: str) -> bytes:
    return msgspec.json.encode({"data": [{"id": "m", "owned_by": kind, "max_model_len": 512}]})


async def chat_body(fake: FakeServer, request: ChatRequest) -> dict[str, Any]:
    """Return the body that reaches the server."""
    fake.answers["/v1/chat/completions"] = (200, "", events(delta("x", "stop")) + DONE)
    async with processor_at(fake) as processor:
        await processor.chat(request, CONTEXT, RecordedText())
    assert fake.requests[-1] == "/v1/chat/completions"
    body: dict[str, Any] = msgspec.json.decode(fake.bodies[-1])
    return body


async def test_text_reasoning_calls_and_usage_stand() -> None:
    async with served() as fake:
        call = {"index": 0, "id": "call_7", "function": {"name": "weather", "arguments": ""}}
        more = {"index": 0, "function": {"arguments": '{"city": "Rome"}'}}
        fake.answers["/v1/chat/completions"] = (
            200,
            "",
            events(
                delta("", role="assistant"),
                delta(reasoning_content="hm"),
                delta("Let me see."),
                delta(tool_calls=[call]),
                delta(tool_calls=[more]),
                delta(reason="tool_calls"),
                {"choices": [], "usage": USAGE},
            )
            + DONE,
        )
        reply = RecordedText()
        async with processor_at(fake) as processor:
            await processor.chat(ChatRequest("m", MESSAGES, tools=(TOOL,)), CONTEXT, reply)
    assert reply.parts == [
        ReasoningDelta("hm"),
        "Let me see.",
        CallBegun(0, "call_7", "weather"),
        ArgumentsDelta(0, '{"city": "Rome"}'),
        CallEnded(0),
    ]
    assert reply.ends == [TextFinish("tool_calls", 9, None, 3, prompt_tokens=40, cached_tokens=32)]


async def test_text_behind_a_call_ends_the_call() -> None:
    async with served() as fake:
        call = {"index": 0, "id": "call_7", "function": {"name": "weather", "arguments": ""}}
        late = {"index": 0, "function": {"arguments": "late"}}
        fake.answers["/v1/chat/completions"] = (
            200,
            "",
            events(
                delta(tool_calls=[call]),
                delta("Done."),
                delta(tool_calls=[late]),
                delta(reason="tool_calls"),
            )
            + DONE,
        )
        reply = RecordedText()
        async with processor_at(fake) as processor:
            await processor.chat(ChatRequest("m", MESSAGES, tools=(TOOL,)), CONTEXT, reply)
    assert reply.parts == [
        CallBegun(0, "call_7", "weather"),
        ArgumentsDelta(0, "{}"),
        CallEnded(0),
        "Done.",
    ]


async def test_logprobs_stand() -> None:
    async with served() as fake:
        best = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5, "bytes": [98]}]
        content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": best}]
        part = delta("a", "stop")
        part["choices"][0]["logprobs"] = {"content": content}
        fake.answers["/v1/chat/completions"] = (200, "", events(part) + DONE)
        reply = RecordedText()
        options = TextOptions(top_logprobs=2)
        async with processor_at(fake) as processor:
            await processor.chat(ChatRequest("m", MESSAGES, options), CONTEXT, reply)
    body = msgspec.json.decode(fake.bodies[-1])
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    assert reply.logprobs == [
        DecodedTokenLogprob("a", b"a", -0.5, (("a", b"a", -0.5), ("b", b"b", -1.5)))
    ]


async def test_a_server_gets_the_conversation_and_only_what_the_caller_said() -> None:
    async with served() as fake:
        body = await chat_body(fake, ChatRequest("m", MESSAGES))
    assert body == {
        "messages": [dict(MESSAGES[0])],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", {"max_tokens": 5, "top_k": -1, "repetition_penalty": 1.1, "cache_salt": "s"}),
        ("llamacpp", {"max_tokens": 5, "top_k": 0, "repeat_penalty": 1.1, "cache_prompt": False}),
    ],
)
async def test_parameters_have_the_names_of_the_server(kind: str, expected: dict[str, Any]) -> None:
    sampling = SamplingOverrides(top_k=0, repetition_penalty=1.1)
    form = StructuredOutput("json_schema", '{"type": "object"}')
    options = TextOptions(max_tokens=5, sampling=sampling, salt="s", structured=form)
    async with served() as fake:
        fake.answers["/v1/models"] = (200, "", models_of(kind))
        body = await chat_body(fake, ChatRequest("m", MESSAGES, options, callable_tools=()))
    assert {name: body.get(name) for name in expected} == expected
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_what_a_plain_server_does_not_know_is_refused_by_name() -> None:
    options = TextOptions(sampling=SamplingOverrides(min_p=0.1))
    async with served() as fake:
        fake.answers["/v1/models"] = (200, "", models_of("someone"))
        with pytest.raises(Unsupported, match="min_p"):
            await chat_body(fake, ChatRequest("m", MESSAGES, options))


async def test_what_names_tokens_is_refused_by_name() -> None:
    async def send(*_: object) -> None:
        raise AssertionError("nothing is sent")

    processor = TextProcessor(card(), send, SamplingSettings())
    reply = RecordedText()
    biased = TextOptions(sampling=SamplingOverrides(logit_bias={5: 1.0}))
    stopped = TextOptions(stop_token_ids=(5,))
    scored = TextOptions(prompt_logprobs=1)
    refused = {"logit_bias": biased, "stop_token_ids": stopped, "logprobs of the prompt": scored}
    for name, options in refused.items():
        with pytest.raises(Unsupported, match=f"{name}: the tokenizer of m is not at hand"):
            await processor.chat(ChatRequest("m", MESSAGES, options), CONTEXT, reply)
    with pytest.raises(Unsupported, match="token ids as a prompt"):
        await processor.complete(CompletionRequest("m", b"\0\0\0\0"), CONTEXT, reply)
    with pytest.raises(Unsupported, match="/tokenize"):
        await processor.tokenize("a")
    with pytest.raises(Unsupported, match="/detokenize"):
        await processor.detokenize([1])


async def test_conversations_that_begin_alike_have_common_blocks() -> None:
    sent: list[bytes] = []

    async def send(request: Any, *_: object) -> None:
        assert "text" in required_features(request)
        sent.append(request.token_ids)

    processor = TextProcessor(card(), send, SamplingSettings())
    first = {"role": "user", "content": "the same beginning " * 20}
    for turn in ("one", "two"):
        messages = (first, {"role": "user", "content": turn})
        await processor.chat(ChatRequest("m", messages), CONTEXT, RecordedText())
    assert [len(prompt) % 4 for prompt in sent] == [0, 0]
    assert sent[0] != sent[1]
    assert sent[0][:400] == sent[1][:400]


@pytest.mark.parametrize("kind", ["dynamo", "vllm", "sglang", "llamacpp", "someone"])
async def test_only_servers_that_obey_a_pattern_of_white_space_announce_it(kind: str) -> None:
    async with served() as fake:
        fake.answers["/v1/models"] = (200, "", models_of(kind))
        engine = OpenAIServerEngine(HttpClient(fake.url, {}, None), None, SystemClock())
        info = await engine.start()
        await engine.stop()
    assert ("whitespace" in info.features) == (kind == "dynamo")


async def test_a_pattern_of_white_space_reaches_a_server_that_obeys_it() -> None:
    form = StructuredOutput("json_schema", '{"type": "object"}', whitespace_pattern=" ?")
    async with served() as fake:
        fake.answers["/v1/models"] = (200, "", models_of("dynamo"))
        body = await chat_body(fake, ChatRequest("m", MESSAGES, TextOptions(structured=form)))
    assert body["structured_outputs"] == {"json": {"type": "object"}, "whitespace_pattern": " ?"}


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, b'{"error": {"message": "no such tool"}}', InvalidRequest),
        (500, b"oops", WorkerFailed),
        (200, events(delta("x")), WorkerFailed),
        (200, b"data: {broken\n\n", WorkerFailed),
    ],
)
async def test_errors_of_the_server_are_ours(
    status: int, body: bytes, error: type[DynamoError]
) -> None:
    async with served() as fake:
        fake.answers["/v1/chat/completions"] = (status, "", body)
        async with processor_at(fake) as processor:
            with pytest.raises(error):
                await processor.chat(ChatRequest("m", MESSAGES), CONTEXT, RecordedText())


async def test_a_stop_string_is_named() -> None:
    async with served() as fake:
        part = delta("a", "stop")
        part["choices"][0]["stop_reason"] = "END"
        fake.answers["/v1/chat/completions"] = (200, "", events(part) + DONE)
        reply = RecordedText()
        options = TextOptions(stop=("END",))
        async with processor_at(fake) as processor:
            await processor.chat(ChatRequest("m", MESSAGES, options), CONTEXT, reply)
    assert msgspec.json.decode(fake.bodies[-1])["stop"] == ["END"]
    assert [end.stop for end in reply.ends] == ["END"]


async def test_the_callers_key_replaces_the_servers_key() -> None:
    async with served() as fake:
        fake.answers["/v1/chat/completions"] = (200, "", events(delta("x", "stop")) + DONE)
        http = HttpClient(fake.url, {"authorization": "Bearer ours"}, None)
        engine = OpenAIServerEngine(http, None, SystemClock())
        await engine.start()
        processor = TextProcessor(card(), engine.generate, SamplingSettings())
        await processor.chat(ChatRequest("m", MESSAGES), CONTEXT, RecordedText())
        assert b"authorization: Bearer ours\r\n" in fake.headers
        fake.headers.clear()
        theirs = Context("r", api_key="theirs")
        await processor.chat(ChatRequest("m", MESSAGES), theirs, RecordedText())
        assert b"authorization: Bearer theirs\r\n" in fake.headers
        assert b"authorization: Bearer ours\r\n" not in fake.headers
        await engine.stop()


async def test_the_card_tells_the_name_and_context_of_the_server() -> None:
    async with served() as fake:
        settings = Settings()
        engine_settings = replace(settings.engine, kind="openai", urls=(fake.url,))
        async with asyncio.timeout(30):
            engine, model = await open_text_engine(
                replace(settings, engine=engine_settings), SystemClock()
            )
        assert (model.names, model.context_tokens, model.tokenizer) == (("m",), 512, None)
        await engine.stop()


async def test_configured_sampling_goes_to_the_server_unless_the_caller_says_other() -> None:
    sent: list[Any] = []

    async def send(request: Any, *_: object) -> None:
        sent.append(request.text.values)

    configured = SamplingSettings(temperature=0.0, max_tokens=7, stop_tokens=("END",))
    processor = TextProcessor(card(), send, configured)
    options = TextOptions(max_tokens=3, stop=("X",))
    for request in (ChatRequest("m", MESSAGES), ChatRequest("m", MESSAGES, options)):
        await processor.chat(request, CONTEXT, RecordedText())
    assert sent == [
        {"temperature": 0.0, "max_tokens": 7, "stop": ("END",)},
        {"temperature": 0.0, "max_tokens": 3, "stop": ("X", "END")},
    ]
    assert processor.default_sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("names", "mode", "expected"),
    [
        (None, "free", None),
        (None, "required", "required"),
        ((), "free", "none"),
        (("weather",), "named", {"type": "function", "function": {"name": "weather"}}),
    ],
)
async def test_the_choice_of_tools_goes_to_the_server(
    names: tuple[str, ...] | None, mode: CallMode, expected: Any
) -> None:
    request = ChatRequest("m", MESSAGES, tools=(TOOL,), callable_tools=names, call_mode=mode)
    async with served() as fake:
        body = await chat_body(fake, request)
    assert body["tools"] == [TOOL]
    assert body.get("tool_choice") == expected
