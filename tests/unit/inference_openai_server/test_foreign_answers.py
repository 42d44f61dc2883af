"""Answers as servers of other projects write them, and as none should."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids
from dynamo.core.errors import (
    DynamoError,
    InvalidRequest,
    MalformedAnswer,
    Overloaded,
    Unauthorized,
    UpstreamFailed,
)
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    TextPart,
)
from dynamo.core.values import (
    EngineTotals,
    Finish,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    TextParameters,
)
from dynamo.inference.openai_server.completion import CompletionAnswer
from dynamo.inference.openai_server.llamacpp_answer import LlamaCppAnswer
from dynamo.inference.openai_server.streamed_answer import MAX_SILENT_BYTES, PART_SLACK
from dynamo.inference.openai_server.text_answer import REASONING_PARTS, TextAnswer
from dynamo.testing.fakes import CollectedReply

PROMPT = tuple(range(40))
REQUEST = GenerateRequest(
    "r", "m", pack_ids(PROMPT), SamplingParams(), StopConditions(max_tokens=8)
)
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def delta(fields: Any, reason: Any = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason, **more}]})


STOP = delta({}, "stop")


def text_answer(
    max_tokens: int | None = 8, logprobs: int | None = None, *, chat: bool = True
) -> TextAnswer:
    values = {} if max_tokens is None else {"max_tokens": max_tokens}
    request = replace(REQUEST, text=TextParameters(chat=chat, values=values), top_logprobs=logprobs)
    return TextAnswer(request, 4096, CollectedReply(), EngineTotals(), SystemClock())


def token_answer(logprobs: int | None = None, max_tokens: int = 8) -> CompletionAnswer:
    request = replace(REQUEST, top_logprobs=logprobs, stops=StopConditions(max_tokens))
    reply, totals = CollectedReply(), EngineTotals()
    return CompletionAnswer(request, reply, totals, SystemClock(), vocab_size=1000, encode=None)


def read(answer: Any, *parts: bytes) -> CollectedReply:
    """Return what a reply gets of a body."""
    for part in parts:
        if not answer.on_data(part):
            break
    answer.end()
    reply: CollectedReply = answer._reply
    return reply


def parts_of(*body: bytes) -> list[TextPart]:
    """Return the parts of a text answer with this body, and a check of its end."""
    reply = read(text_answer(), *body)
    assert reply.end is not None
    assert reply.end.reason == "stop"
    return reply.parts


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (delta({"content": "a"}) + STOP, "a"),  # without [DONE]
        (delta({"role": "assistant", "content": ""}) + delta({"content": "a"}) + STOP + DONE, "a"),
        (delta(None) + delta({"content": "a"}, "") + STOP + DONE, "a"),
        (delta({"content": "a"}) + DONE, "a"),  # without a reason
        (delta([]) + delta({"content": "a"}, 7) + delta({"content": 5}) + STOP, "a"),
        (event({"choices": None}) + event({"choices": {}}) + delta({"content": "a"}, "stop"), "a"),
        (event(None) + event([]) + event("x") + event(1) + delta({"content": "a"}, "eos"), "a"),
        (b"data:\n\ndata: null\n\n: x\n\n" + delta({"content": "a"}, "end_turn"), "a"),
        (delta({"content": ["a", {"type": "text", "text": "b"}, None, 7]}) + STOP, "ab"),
        (delta({"content": {"type": "text", "text": "a"}}) + STOP, "a"),
        (delta({"content": "a", "tool_calls": None, "refusal": None}) + STOP, "a"),
        (delta({"content": "a", "tool_calls": "x", "function_call": 3}) + STOP, "a"),
        (event({"choices": {"delta": {"content": "a"}, "finish_reason": "stop"}}), "a"),
        (event({"choices": [{"text": "a", "finish_reason": "stop_sequence"}]}), "a"),
        (event({"choices": [{"text": None}, {"text": "z"}]}) + delta({"content": "a"}, "x"), "a"),
        (event({"choices": [{"index": 5, "text": "a", "finish_reason": "stop"}]}), "a"),
        (event({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]})[6:], "a"),
        (delta({"content": "a"}, "stop") + b"data: {broken\n\n" + DONE, "a"),
        (b'data: {"choices":[{"delta":{"content":"\\u0000\\ud800"}}]}\n\n' + STOP, "\0\ufffd"),
        (b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n' + STOP, "\ufffd"),
        (b'data: {"choices":[{"delta":{"content":"\xc3\xa9"},"x":-1e999}]}\n\n' + STOP, "é"),
        (b'data: {"choices":[{"delta":{"content":"a\tb"},"x":NaN}]}\n\n' + STOP, "a\tb"),
        (event({"type": "ping"}) + event({"object": "x", "choices": [None]}) + STOP, ""),
    ],
)
def test_text_is_read_whatever_stands_beside_it(body: bytes, text: str) -> None:
    expected = [TextDelta(text)] if text else []
    merged = "".join(part.text for part in parts_of(body) if isinstance(part, TextDelta))
    assert merged == text
    assert len(parts_of(body)) <= max(1, len(expected))


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning": "hm", "reasoning_content": "hm", "reasoning_details": [{"text": "hm"}]},
        {"thinking": "hm", "content": ""},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
        {"reasoning": {"content": "hm"}},
    ],
)
def test_reasoning_has_several_names(fields: dict[str, Any]) -> None:
    assert parts_of(delta(fields), STOP) == [ReasoningDelta("hm")]


def test_a_completion_is_text_alone() -> None:
    fields = {"reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]}
    body = event({"choices": [{"text": "a", "delta": fields, "finish_reason": "stop"}]})
    assert read(text_answer(chat=False), body).parts == [TextDelta("a")]


@pytest.mark.parametrize(
    "fields", [{"refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]}]
)
def test_a_refusal_is_passed_on(fields: dict[str, Any]) -> None:
    assert parts_of(delta(fields), STOP) == [RefusalDelta("no")]


def test_a_call_in_the_old_form_is_a_tool_call() -> None:
    call = {"name": "f", "arguments": '{"a"'}
    assert parts_of(
        delta({"function_call": call}),
        delta({"function_call": {"arguments": ": 1}"}}, "function_call"),
    ) == [
        CallBegun(0, "call_0", "f"),
        ArgumentsDelta(0, '{"a"'),
        ArgumentsDelta(0, ": 1}"),
        CallEnded(0),
    ]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("model_length", "length"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
        ("content_filter: RECITATION", "content_filter"),
        ("tool_calls", "stop"),
        ("eos_token", "stop"),
        ("a new word", "stop"),
    ],
)
def test_words_for_the_end_of_an_answer(word: str, reason: str) -> None:
    for answer, part in ((text_answer(), {"delta": {}}), (token_answer(), {"token_ids": [5]})):
        body = event({"choices": [{**part, "finish_reason": word}]})
        end = read(answer, body).end
        assert end is not None
        assert end.reason == reason


USAGE = {"prompt_tokens": 40, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (event({"choices": [], "usage": USAGE}), (40, 3, None)),
        (event({"choices": None, "usage": USAGE}), (40, 3, None)),
        (event({"usage": USAGE}) + event({"usage": None}), (40, 3, None)),
        (event({"x_groq": {"usage": USAGE}}), (40, 3, None)),
        (delta({}, None, usage=USAGE), (40, 3, None)),
        (
            event({"usage": USAGE | {"completion_tokens": 2}}) + event({"usage": USAGE}),
            (40, 3, None),
        ),
        (event({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 32}}}), (40, 3, 32)),
        (event({"usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 99}}}), (40, 3, 40)),
        (event({"usage": USAGE | {"prompt_cache_hit_tokens": 8}}), (40, 3, 8)),
        (event({"usage": USAGE | {"prompt_tokens_details": None}}), (40, 3, None)),
        (event({"usage": {"prompt_tokens": 40.0, "completion_tokens": None}}), (40, 1, None)),
        (event({"usage": {"prompt_tokens": -5, "completion_tokens": -7}}), (0, 1, None)),
        (event({"usage": {"prompt_tokens": 1 << 62, "completion_tokens": 10**30}}), (0, 1, None)),
        (event({"usage": {"prompt_tokens": "x", "completion_tokens": True}}), (0, 1, None)),
        (event({"usage": "much"}), (0, 1, None)),
    ],
)
def test_counts_are_read_where_they_are_counts(
    body: bytes, expected: tuple[int, int, int | None]
) -> None:
    end = read(text_answer(), delta({"content": "a"}, "stop"), body, DONE).end
    assert end is not None
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == expected


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (event({"error": {"message": "m", "code": 429}}), Overloaded, "m"),
        (event({"error": {"message": "m", "code": "429"}}), Overloaded, "m"),
        (event({"error": {"message": "m", "code": "rate_limit_exceeded"}}), Overloaded, "m"),
        (event({"error": {"message": "m", "type": "overloaded_error"}}), Overloaded, "m"),
        (event({"error": {"message": "m", "type": "BadRequestError"}}), InvalidRequest, "m"),
        (event({"error": {"message": "m", "code": "invalid_api_key"}}), Unauthorized, "m"),
        (event({"error": {"message": "m", "code": "x"}}), UpstreamFailed, "500: m"),
        (event({"error": {"message": "m", "code": 10**30}}), UpstreamFailed, "500: m"),
        (event({"error": {"code": 400}}), InvalidRequest, "400"),
        (event({"error": "m"}), UpstreamFailed, "500: m"),
        (event({"error": "m", "error_type": "validation"}), InvalidRequest, "m"),
        (event({"error": None, "object": "error", "message": "m"}), UpstreamFailed, "m"),
        (
            event([{"error": {"message": "m", "code": 503, "status": "UNAVAILABLE"}}]),
            Overloaded,
            "m",
        ),
        (event({"detail": "m"}), UpstreamFailed, "m"),
        (event({"detail": [{"msg": "m"}]}), UpstreamFailed, "m"),
        (b"event: error\n" + event({"message": "m"}), UpstreamFailed, "m"),
        (b'event: error\ndata: "m"\n\n', UpstreamFailed, "m"),
        (b"error: " + event({"code": 400, "message": "m"})[6:], InvalidRequest, "m"),
        (delta({}, "error", error={"code": 502, "message": "m"}), UpstreamFailed, "m"),
        (delta({"content": "a"}, "error"), UpstreamFailed, "finish_reason 'error'"),
        (delta({}, "insufficient_system_resource") + DONE, UpstreamFailed, "insufficient"),
        (event({"error": {"message": "m"}})[6:], UpstreamFailed, "m"),  # no event, but JSON
        (b'data: {"error":' + b"[" * 50_000 + b"\n\n", MalformedAnswer, "no completion"),
        (b"data: nonsense\n\n", MalformedAnswer, "no completion: 'nonsense'"),
        (b"<html>\n<title>Bad gateway</title>", MalformedAnswer, "no completion: '<html>'"),
        (b"", MalformedAnswer, "before it was complete"),
        (DONE, MalformedAnswer, "without a finish_reason"),
        (delta({"content": "a"}), MalformedAnswer, "ended an answer before it was complete"),
    ],
)
def test_errors_in_a_stream_have_a_type(
    body: bytes, error: type[DynamoError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(text_answer(), body)


def test_logprobs_are_read_where_they_are_numbers() -> None:
    content = [
        {"token": "a", "logprob": -0.5, "bytes": [97, 999], "top_logprobs": None},
        {"token": None, "logprob": -0.5},
        {"token": "b", "logprob": None},
        None,
        {"token": "c", "logprob": -1e308, "top_logprobs": [{"token": "c", "logprob": -1}, {}]},
    ]
    body = delta({"content": "abc"}, "stop", logprobs={"content": content})
    lists = {"tokens": ["d", 5], "token_logprobs": [], "top_logprobs": [{"d": -2.0, "e": None}]}
    more = delta({"content": "d"}, None, logprobs=lists)
    none = delta({"content": "e"}, None, logprobs=None)
    assert read(text_answer(logprobs=1), more, none, body).parts == [
        TextDelta("d", (DecodedTokenLogprob("d", b"d", 0.0, (("d", b"d", -2.0),)),)),
        TextDelta("e"),
        TextDelta(
            "abc",
            (
                DecodedTokenLogprob("a", b"a", -0.5),
                DecodedTokenLogprob("c", b"c", -9999.0, (("c", b"c", -1),)),
            ),
        ),
    ]


def test_text_beyond_the_asked_length_is_cut() -> None:
    answer = text_answer(max_tokens=8)
    part = delta({"content": "x"}) * 50
    reply = read(answer, *[part] * 1000)
    assert len(reply.parts) <= 4 * 8 + PART_SLACK + 1
    assert reply.end == Finish("length", 8)


def test_reasoning_without_an_end_is_cut() -> None:
    reply = read(text_answer(max_tokens=8), *[delta({"reasoning": "x"}) * 1000] * 100)
    assert len(reply.parts) <= REASONING_PARTS + 4 * 8 + PART_SLACK + 1
    assert reply.end == Finish("length", 8)


def test_long_text_without_an_end_is_cut() -> None:
    reply = read(text_answer(max_tokens=8), *[delta({"content": "x" * 100_000})] * 100)
    assert len(reply.parts) < 12
    assert reply.end == Finish("length", 8)


@pytest.mark.parametrize("part", [b": x\n", b"\n", event({"choices": []}), delta({}), b"id: 1\n"])
def test_a_stream_without_an_answer_ends(part: bytes) -> None:
    for answer in (text_answer(), token_answer()):
        parts = [part * 10_000] * (MAX_SILENT_BYTES // len(part) // 10_000 + 2)
        with pytest.raises(MalformedAnswer, match="without a part of the answer"):
            read(answer, *parts)


def ids(token_ids: Any, reason: str | None = None, **more: Any) -> bytes:
    choice = {"text": "x", "token_ids": token_ids, "finish_reason": reason, **more}
    return event({"choices": [choice]})


@pytest.mark.parametrize(
    "token_ids",
    [[1000], [-1], [1 << 40], [1, 1000], [1.5], ["1"], [None], "12", {"1": 2}, None, []],
)
def test_ids_that_the_model_lacks_are_no_answer(token_ids: Any) -> None:
    with pytest.raises(MalformedAnswer, match="ids"):
        read(token_answer(), ids(token_ids))


def test_tokens_beyond_the_asked_number_are_cut() -> None:
    reply = read(token_answer(max_tokens=8), ids([5, 6, 7]), ids([8] * 1000), ids([9]))
    assert reply.ids == [5, 6, 7, 8, 8, 8, 8, 8]
    assert reply.end == Finish("length", 8)


def test_logprobs_of_tokens_are_finite_and_complete() -> None:
    logprobs = {"token_logprobs": [None, -1e308], "top_logprobs": [None, {"token_id:7": -1}]}
    reply = read(token_answer(logprobs=1), ids([5, 7], "stop", logprobs=logprobs))
    (tokens,) = reply.extras
    assert tokens is not None
    assert [(each.logprob, each.top) for each in tokens] == [(0.0, ()), (-9999.0, ((7, -1),))]
    for missing in (None, {}, {"token_logprobs": [-1]}, []):
        with pytest.raises(MalformedAnswer, match="no log probabilities"):
            read(token_answer(logprobs=1), ids([5, 7], logprobs=missing))


def llamacpp(*parts: bytes) -> CollectedReply:
    answer = LlamaCppAnswer(REQUEST, CollectedReply(), EngineTotals(), SystemClock())
    return read(answer, *parts)


def llamacpp_token(token: Any) -> bytes:
    logprobs = {"content": [{"id": token, "bytes": [97], "logprob": -1, "top_logprobs": []}]}
    return event({"choices": [{"text": "a", "finish_reason": None, "logprobs": logprobs}]})


def test_a_llamacpp_server_may_send_nonsense() -> None:
    end = event({"choices": [{"text": "", "finish_reason": "stop"}]})
    assert llamacpp(b"data:\n\n", llamacpp_token(5), end, DONE).ids == [5]
    for odd in ({}, {"choices": None}, {"choices": [{}]}, [], 5, {"prompt_progress": 7}):
        with pytest.raises(MalformedAnswer, match="no completion"):
            llamacpp(event(odd))
    with pytest.raises(MalformedAnswer, match="more than 8 tokens"):
        llamacpp(llamacpp_token(5) * 20)
    with pytest.raises(MalformedAnswer, match="without a part of the answer"):
        llamacpp(*[b": x\n" * 10_000] * 100)
    with pytest.raises(InvalidRequest, match="bad"):
        llamacpp(b"error: " + event({"code": 400, "message": "bad"})[6:])
    with pytest.raises(MalformedAnswer, match="before it was complete"):
        llamacpp(llamacpp_token(5))
