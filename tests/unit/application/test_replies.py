"""The ends of streamed and complete answers: without text, early, congested, several choices."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics, TokenTiming
from dynamo.application.generation.replies import HttpReply, OffsetReply, StreamReply, UnaryReply
from dynamo.application.items import UsageCounter
from dynamo.application.openai.completions import COMPLETION_RESPONSE
from dynamo.application.openai.writer import OpenAIWriter
from dynamo.communication.http import Request
from dynamo.communication.http.response import Response
from dynamo.core.errors import InternalError, SlowReader
from dynamo.core.fast_path import TextTable, TokenTexts
from dynamo.core.text import DecodedTokenLogprob, TextFinish
from dynamo.core.values import Started
from dynamo.telemetry.metrics import Registry

END = TextFinish("stop", 3)


class FakeConnection:
    """A connection that keeps the events that it should send."""

    def __init__(self) -> None:
        self.output: list[bytes] = []
        self.pending_events: list[bytes] = []
        self.chunked = False

    def schedule_flush(self) -> None:
        pass

    def merge_events(self) -> None:
        self.output += self.pending_events
        self.pending_events.clear()

    def unsent_bytes(self) -> int:
        return sum(map(len, self.pending_events))


class Answer:
    """A reply with some choices, and the events that it sent."""

    def __init__(self, choices: int = 1, *, stream: bool = True, limit: int = 1 << 20) -> None:
        self.connection = FakeConnection()
        self.response = Response(
            self.connection, "POST", "1.1", keep_alive=True, backlog_limit=limit
        )
        ticks = itertools.count(1)
        metrics = FrontendMetrics(Registry()).for_model("m")
        timing = TokenTiming(metrics, lambda: float(next(ticks)), 0.0, choices)
        exchange = Exchange(Request("POST", b"/", {}), self.response, "1", "1", ())
        writer = OpenAIWriter(COMPLETION_RESPONSE, "1", "m", 0, include_usage=stream)
        usage = self.usage = UsageCounter(choices)
        reply_type = StreamReply if stream else UnaryReply
        self.reply: HttpReply = reply_type(exchange, writer, usage, timing)
        self.reply.prompt(5)
        for choice in range(choices):
            self.reply.begin(choice, Started("w"))

    @property
    def events(self) -> list[Any]:
        """The events for the client: (choice, text, finish reason), completion tokens, "[DONE]"."""
        self.connection.merge_events()
        body = b"".join(data for data in self.connection.output if not data.startswith(b"HTTP/"))
        events = body.decode().removesuffix("0\r\n\r\n").split("\n\n")[:-1]
        parsed: list[Any] = []
        for event in (event.removeprefix("data: ") for event in events):
            if event == "[DONE]":
                parsed.append(event)
                continue
            chunk = json.loads(event)
            parsed += [(c["index"], c["text"], c["finish_reason"]) for c in chunk["choices"]]
            parsed += [chunk["usage"]["completion_tokens"]] if chunk.get("usage") else []
        return parsed


def test_a_stream_without_text_has_a_head_and_an_end() -> None:
    answer = Answer()
    answer.reply.finish(0, END)
    answer.reply.check_complete()
    assert answer.response.status == 200
    assert answer.events == [(0, "", "stop"), 3, "[DONE]"]


def test_a_stream_ends_with_its_last_choice() -> None:
    answer = Answer(2)
    assert answer.reply.text(1, "b")
    answer.reply.finish(1, END)
    assert not answer.response.ended
    assert answer.reply.text(0, "a")
    answer.reply.finish(0, END)
    assert answer.events == [
        (1, "b", None),
        (1, "", "stop"),
        (0, "a", None),
        (0, "", "stop"),
        6,
        "[DONE]",
    ]
    answer.reply.check_complete()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ends_early_is_an_error_unless_the_client_left(stream: bool) -> None:
    answer = Answer(2, stream=stream)
    answer.reply.text(0, "a")
    answer.reply.finish(0, END)
    with pytest.raises(InternalError, match="ended early"):
        answer.reply.check_complete()
    answer.response.open = False
    answer.reply.check_complete()


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_the_generation(stream: bool) -> None:
    answer = Answer(stream=stream)
    assert answer.reply.text(0, "a")
    answer.response.open = False
    assert not answer.reply.text(0, "b")


def test_text_held_back_by_congestion_is_sent_before_the_end() -> None:
    answer = Answer(2)
    answer.reply.text(0, "a")
    answer.response.congested = True
    for delta in ("b", "c"):
        assert answer.reply.text(0, delta)
        assert answer.reply.text(1, delta.upper())
    answer.reply.finish(0, END)
    assert answer.events == [(0, "a", None), (0, "bc", None), (0, "", "stop")]
    answer.response.congested = False
    assert answer.response.on_writable is not None
    answer.response.on_writable()
    assert answer.reply.text(1, "D")
    answer.reply.finish(1, END)
    assert answer.events[3:] == [(1, "BC", None), (1, "D", None), (1, "", "stop"), 6, "[DONE]"]


def test_a_stream_over_its_backlog_limit_raises_slow_reader() -> None:
    answer = Answer(limit=1_000)
    answer.reply.text(0, "a")
    answer.response.congested = True
    written = 0
    while answer.reply.text(0, "x" * 100):
        written += 100
        assert written < 1_000
    assert written > 500
    answer.reply.finish(0, END)
    assert not answer.response.ended
    with pytest.raises(SlowReader):
        answer.reply.check_complete()


def test_a_complete_answer_has_every_choice() -> None:
    answer = Answer(2, stream=False)
    for choice, delta in ((1, "b"), (0, "a"), (1, "B")):
        assert answer.reply.text(choice, delta)
    answer.reply.finish(0, END)
    assert not answer.connection.output
    answer.reply.finish(1, TextFinish("length", 4))
    answer.reply.check_complete()
    head, body = answer.connection.output
    assert b"x-dynamo-worker: w" in head
    read = json.loads(body)
    assert [(c["text"], c["finish_reason"]) for c in read["choices"]] == [
        ("a", "stop"),
        ("bB", "length"),
    ]
    assert (read["usage"]["prompt_tokens"], read["usage"]["completion_tokens"]) == (5, 7)


def test_text_held_back_by_an_ended_choice_is_counted_once() -> None:
    answer = Answer(2, limit=2_000)
    answer.reply.text(0, "a")
    answer.reply.text(1, "b")
    answer.connection.merge_events()
    answer.response.congested = True
    assert answer.reply.text(0, "x" * 800)
    answer.reply.finish(0, END)
    backlog = answer.response.backlog_bytes
    assert 800 < backlog < 1_300
    assert answer.reply.text(1, "y" * 500)
    assert not answer.reply.text(1, "y" * 1_000)


def test_choices_of_a_later_prompt_are_numbered_on() -> None:
    answer = Answer(4, stream=False)
    second = OffsetReply(answer.reply, 2)
    for reply, name in ((answer.reply, "a"), (second, "b")):
        for choice in (0, 1):
            reply.begin(choice, Started("w"))
            assert reply.text(choice, f"{name}{choice}")
            reply.finish(choice, TextFinish("length" if choice else "stop", 1))
    read = json.loads(answer.connection.output[1])
    assert [(c["text"], c["finish_reason"]) for c in read["choices"]] == [
        ("a0", "stop"),
        ("a1", "length"),
        ("b0", "stop"),
        ("b1", "length"),
    ]
    second.prompt(7)
    assert answer.usage.prompt_tokens == 12


def test_a_later_prompt_has_its_own_fast_path() -> None:
    answer = Answer(2)
    second = OffsetReply(answer.reply, 1)
    text_table = TextTable(TokenTexts(["x"]))
    assert second.open_fast_path(0, text_table, None) is None
    answer.reply.text(0, "a")
    second.text(0, "b")
    answer.connection.merge_events()
    token_log = array("I")
    fast_path = second.open_fast_path(0, text_table, token_log)
    assert fast_path is not None
    assert fast_path.send_token(0)
    assert (answer.events[-1], token_log.tolist()) == ((1, "x", None), [0])
    other = second.open_fast_path(0, text_table, None)
    assert other is not None
    assert other.send_token(0)
    assert token_log.tolist() == [0]


def test_an_answer_that_is_not_streamed_may_begin_anew() -> None:
    answer = Answer(2, stream=False)
    for choice, text in ((0, "a"), (1, "b")):
        answer.reply.text(choice, text, [DecodedTokenLogprob(text, text.encode(), -1.0)])
    assert answer.reply.restart(0)
    answer.reply.text(0, "c")
    answer.reply.finish(0, END)
    answer.reply.finish(1, END)
    answer.connection.merge_events()
    body = b"".join(answer.connection.output).partition(b"\r\n\r\n")[2]
    choices = json.loads(body)["choices"]
    assert [choice["text"] for choice in choices] == ["c", "b"]
    assert [choice["logprobs"] is None for choice in choices] == [True, False]


def test_a_streamed_answer_does_not_begin_anew() -> None:
    answer = Answer()
    answer.reply.text(0, "a")
    assert not answer.reply.restart(0)
    assert not OffsetReply(answer.reply, 0).restart(0)
