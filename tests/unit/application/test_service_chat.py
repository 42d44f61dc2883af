"""Chat between services: requests as plain values, and chunks to text and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dynamo.application.openai.service_chat import (
    ChatAnswerReply,
    ChatChunkReader,
    ChatChunkReply,
    chat_request_from_dict,
    chat_request_to_dict,
)
from dynamo.core.errors import InvalidRequest, ProtocolError, Unsupported
from dynamo.core.text import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ChatRequest,
    DecodedTokenLogprob,
    ReasoningDelta,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started


class RecordingReply(TextReply):
    """Records all calls in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self.calls.append(("prompt", prompt_tokens))

    def begin(self, choice: int, started: Started) -> None:
        self.calls.append(("begin", choice))

    def text(
        self, choice: int, delta: str, logprobs: Sequence[DecodedTokenLogprob] | None = None
    ) -> bool:
        self.calls.append((choice, delta))
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        self.calls.append(("finish", choice, end.reason, end.completion_tokens))


def answer_hello(reply: TextReply) -> None:
    reply.prompt(7)
    reply.begin(0, Started(worker="w"))
    reply.text(0, "he")
    reply.text(0, "llo")
    reply.finish(0, TextFinish("length", 2))


def test_chunks_are_read_back_as_the_same_text() -> None:
    chunks: list[dict[str, Any]] = []
    answer_hello(
        ChatChunkReply(lambda chunk: not chunks.append(chunk), {"id": "x", "model": "m"}, 1)
    )
    reply = RecordingReply()
    reader = ChatChunkReader(reply)
    for chunk in chunks:
        assert reader.receive(chunk)
    reader.end()

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["usage"]["total_tokens"] == 9
    assert reply.calls == [
        *(("prompt", 7), ("begin", 0), (0, "he"), (0, "llo"), ("finish", 0, "length", 2))
    ]


def answer_with_a_call(reply: TextReply) -> None:
    reply.prompt(7)
    reply.begin(0, Started(worker="w"))
    for event in CALL_EVENTS:
        reply.event(0, event)
    reply.finish(0, TextFinish("tool_calls", 2))


CALL_EVENTS: list[AnswerEvent] = [
    ReasoningDelta("hm"),
    CallBegun(0, "call_1", "f"),
    ArgumentsDelta(0, "{"),
    ArgumentsDelta(0, "}"),
    CallEnded(0),
]


class EventReply(RecordingReply):
    """Records events, too."""

    def event(self, choice: int, event: AnswerEvent) -> bool:
        self.calls.append((choice, event))
        return True


def test_reasoning_and_calls_pass_between_services_in_chunks() -> None:
    reply = EventReply()
    reader = ChatChunkReader(reply)
    answer_with_a_call(ChatChunkReply(reader.receive, {}, 1))
    reader.end()
    assert [call[1] for call in reply.calls if call[0] == 0] == CALL_EVENTS
    assert reply.calls[-1] == ("finish", 0, "tool_calls", 2)


def test_calls_without_arguments_have_an_empty_object_in_each_choice() -> None:
    reply = EventReply()
    reader = ChatChunkReader(reply, 2)
    begun, arguments = {"id": "c", "function": {"name": "f"}}, {"function": {"arguments": "{1}"}}
    for choice, call in ((0, begun), (1, begun), (0, arguments)):
        delta = {"tool_calls": [{"index": 0, **call}]}
        reader.receive({"choices": [{"index": choice, "delta": delta}]})
    reader.end()
    texts = [(call[0], call[1].text) for call in reply.calls if type(call[1]) is ArgumentsDelta]
    assert texts == [(0, "{1}"), (1, "{}")]


def test_indices_of_a_single_choice_are_not_read() -> None:
    reply = RecordingReply()
    reader = ChatChunkReader(reply)
    for index in range(3):
        reader.receive({"choices": [{"index": index, "delta": {"content": f"{index}"}}]})
    reader.receive({"choices": [{"text": "!", "finish_reason": "length"}]})
    reader.end()
    texts = [(0, "0"), (0, "1"), (0, "2"), (0, "!")]
    assert reply.calls == [("begin", 0), *texts, ("prompt", 0), ("finish", 0, "length", 0)]


def test_a_choice_that_was_not_asked_for_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="index 2"):
        ChatChunkReader(RecordingReply(), 2).receive({"choices": [{"index": 2}]})


def test_reasoning_and_calls_pass_between_services_in_one_answer() -> None:
    whole = ChatAnswerReply()
    answer_with_a_call(whole)
    assert whole.answer["finish_reason"] == "tool_calls"
    reply = EventReply()
    reader = ChatChunkReader(reply)
    message = {key: whole.answer[key] for key in ("content", "reasoning_content", "tool_calls")}
    reader.receive({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    reader.end()
    events = [call[1] for call in reply.calls if call[0] == 0]
    assert events == [*CALL_EVENTS[:2], ArgumentsDelta(0, "{}"), CALL_EVENTS[-1]]


@pytest.mark.parametrize("names", [None, (), ("g",)])
def test_the_choice_of_tools_passes_between_services(names: tuple[str, ...] | None) -> None:
    tools = tuple({"type": "function", "function": {"name": name}} for name in ("f", "g"))
    messages = ({"role": "user", "content": "hi"},)
    request = ChatRequest(
        "m", messages, tools=tools, callable_tools=names, parallel_tool_calls=False
    )
    assert chat_request_from_dict(chat_request_to_dict(request), "m", "reject") == request


def test_a_service_adds_text_before_and_after_the_model() -> None:
    reply = RecordingReply()
    reader = ChatChunkReader(reply)
    reader.receive("first ")
    answer_hello(ChatChunkReply(reader.receive, {}, 1))
    reader.receive(" last")
    reader.end()

    assert reply.calls == [
        *(("begin", 0), (0, "first "), (0, "he"), (0, "llo"), (0, " last")),
        *(("prompt", 7), ("finish", 0, "length", 2)),
    ]


def test_a_completion_and_an_empty_answer() -> None:
    reply = RecordingReply()
    reader = ChatChunkReader(reply)
    reader.receive({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})
    reader.end()
    empty = RecordingReply()
    ChatChunkReader(empty).end()

    assert (0, "yes") in reply.calls
    assert empty.calls == [("begin", 0), ("prompt", 0), ("finish", 0, "stop", 0)]


@pytest.mark.parametrize("item", [7, None, {"choices": 1}, {"choices": [{"delta": "x"}]}])
def test_invalid_items_raise_a_protocol_error(item: Any) -> None:
    with pytest.raises(ProtocolError, match="texts or with OpenAI's chunks"):
        ChatChunkReader(RecordingReply()).receive(item)


def test_an_answer_reply_collects_the_whole_answer() -> None:
    reply = ChatAnswerReply()
    answer_hello(reply)

    assert reply.answer["content"] == "hello"
    assert reply.answer["finish_reason"] == "length"
    assert reply.answer["usage"]["prompt_tokens"] == 7


def test_a_request_survives_conversion_to_a_dict() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "cache_salt": "s",
        "seed": 3,
        "logit_bias": {5: 1.5},
        "include_stop_str_in_output": True,
        "continue_final_message": True,
    }
    request = chat_request_from_dict(body, "m", "reject")

    assert chat_request_from_dict(chat_request_to_dict(request), "m", "reject") == request
    assert chat_request_to_dict(request)["temperature"] == 0.5


def test_invalid_requests_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        chat_request_from_dict({"messages": [], "temperature": 9}, "m", "reject")
    with pytest.raises(InvalidRequest, match="a mapping"):
        chat_request_from_dict([1], "m", "reject")
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(Unsupported, match="logprobs"):
        chat_request_from_dict({"messages": messages, "logprobs": True}, "m", "reject")
