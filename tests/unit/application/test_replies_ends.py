"""How streams and whole answers end: without text, early, congested, with several choices."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics
from dynamo.application.generation.replies import OffsetReply, StreamReply, UnaryReply
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.openai.completions import COMPLETION_RESPONSE
from dynamo.application.openai.response_encoder import JsonStringCache, ResponseEncoder
from dynamo.application.openai.usage import UsageCounter
from dynamo.communication.http.response import Response
from dynamo.core.errors import InternalError, SlowReader
from dynamo.core.fast_path import TextTable
from dynamo.core.text import TextFinish
from dynamo.core.values import Started
from dynamo.telemetry.metrics import Registry

END = TextFinish("stop", 3)


class Wire:
    """A connection that keeps what it is to send, event by event."""

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
    """A reply of so many choices, and what went out."""

    def __init__(self, choices: int = 1, *, stream: bool = True, limit: int = 1 << 20) -> None:
        self.wire = Wire()
        self.response = Response(self.wire, "POST", "1.1", keep_alive=True, backlog_limit=limit)
        ticks = itertools.count(1)
        metrics = FrontendMetrics(Registry()).for_model("m")
        pace = TokenTiming(metrics, lambda: float(next(ticks)), 0.0, choices)
        request: Any = None
        exchange = Exchange(request, self.response, "1", "1", ())
        form = ResponseEncoder(COMPLETION_RESPONSE, "1", "m", 0, include_usage=stream)
        tally = self.tally = UsageCounter(choices)
        self.reply: StreamReply | UnaryReply
        if stream:
            self.reply = StreamReply(
                exchange, form, tally, pace, JsonStringCache(), choices=choices, include_usage=True
            )
        else:
            self.reply = UnaryReply(exchange, form, tally, pace, choices=choices)
        self.reply.prompt(5)
        for choice in range(choices):
            self.reply.begin(choice, Started("w"))

    @property
    def told(self) -> list[Any]:
        """What a client reads: (choice, text, reason) of every event, `usage`, "[DONE]"."""
        self.wire.merge_events()
        whole = b"".join(one for one in self.wire.output if not one.startswith(b"HTTP/"))
        events = whole.decode().removesuffix("0\r\n\r\n").split("\n\n")[:-1]
        found: list[Any] = []
        for event in (one.removeprefix("data: ") for one in events):
            if event == "[DONE]":
                found.append(event)
                continue
            read = json.loads(event)
            found += [(c["index"], c["text"], c["finish_reason"]) for c in read["choices"]]
            found += [read["usage"]["completion_tokens"]] if read.get("usage") else []
        return found


def test_a_stream_without_text_has_a_head_and_an_end() -> None:
    one = Answer()
    one.reply.finish(0, END)
    one.reply.check_complete()
    assert one.response.status == 200
    assert one.told == [(0, "", "stop"), 3, "[DONE]"]


def test_a_stream_is_done_when_its_last_choice_is() -> None:
    one = Answer(2)
    assert one.reply.text(1, "b")
    one.reply.finish(1, END)
    assert not one.response.ended
    assert one.reply.text(0, "a")
    one.reply.finish(0, END)
    assert one.told == [
        (1, "b", None),
        (1, "", "stop"),
        (0, "a", None),
        (0, "", "stop"),
        6,
        "[DONE]",
    ]
    one.reply.check_complete()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_ended_early_is_an_error_unless_its_reader_left(stream: bool) -> None:
    one = Answer(2, stream=stream)
    one.reply.text(0, "a")
    one.reply.finish(0, END)
    with pytest.raises(InternalError, match="ended early"):
        one.reply.check_complete()
    one.response.open = False
    one.reply.check_complete()


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_left_is_told_upward(stream: bool) -> None:
    one = Answer(stream=stream)
    assert one.reply.text(0, "a")
    one.response.open = False
    assert not one.reply.text(0, "b")


def test_what_a_congested_client_has_not_read_comes_before_the_end() -> None:
    one = Answer(2)
    one.reply.text(0, "a")
    one.response.congested = True
    for delta in ("b", "c"):
        assert one.reply.text(0, delta)
        assert one.reply.text(1, delta.upper())
    one.reply.finish(0, END)
    assert one.told == [(0, "a", None), (0, "bc", None), (0, "", "stop")]
    one.response.congested = False
    assert one.response.on_writable is not None
    one.response.on_writable()
    assert one.reply.text(1, "D")
    one.reply.finish(1, END)
    assert one.told[3:] == [(1, "BC", None), (1, "D", None), (1, "", "stop"), 6, "[DONE]"]


def test_past_its_backlog_a_stream_is_given_up_and_says_so() -> None:
    one = Answer(limit=1_000)
    one.reply.text(0, "a")
    one.response.congested = True
    said = 0
    while one.reply.text(0, "x" * 100):
        said += 100
        assert said < 1_000
    assert said > 500
    one.reply.finish(0, END)
    assert not one.response.ended
    with pytest.raises(SlowReader):
        one.reply.check_complete()


def test_a_whole_answer_has_every_choice() -> None:
    one = Answer(2, stream=False)
    for choice, delta in ((1, "b"), (0, "a"), (1, "B")):
        assert one.reply.text(choice, delta)
    one.reply.finish(0, END)
    assert not one.wire.output
    one.reply.finish(1, TextFinish("length", 4))
    one.reply.check_complete()
    head, body = one.wire.output
    assert b"x-dynamo-worker: w" in head
    read = json.loads(body)
    assert [(c["text"], c["finish_reason"]) for c in read["choices"]] == [
        ("a", "stop"),
        ("bB", "length"),
    ]
    assert (read["usage"]["prompt_tokens"], read["usage"]["completion_tokens"]) == (5, 7)


def test_what_an_ended_choice_had_held_is_counted_once() -> None:
    one = Answer(2, limit=2_000)
    one.reply.text(0, "a")
    one.reply.text(1, "b")
    one.wire.merge_events()
    one.response.congested = True
    assert one.reply.text(0, "x" * 800)
    one.reply.finish(0, END)
    waits = one.response.backlog_bytes
    assert 800 < waits < 1_300
    assert one.reply.text(1, "y" * 500)
    assert not one.reply.text(1, "y" * 1_000)


def test_choices_of_a_later_prompt_are_counted_on() -> None:
    one = Answer(4, stream=False)
    second = OffsetReply(one.reply, 2)
    for reply, name in ((one.reply, "a"), (second, "b")):
        for choice in (0, 1):
            reply.begin(choice, Started("w"))
            assert reply.text(choice, f"{name}{choice}")
            reply.finish(choice, TextFinish("length" if choice else "stop", 1))
    read = json.loads(one.wire.output[1])
    assert [(c["text"], c["finish_reason"]) for c in read["choices"]] == [
        ("a0", "stop"),
        ("a1", "length"),
        ("b0", "stop"),
        ("b1", "length"),
    ]
    second.prompt(7)
    assert one.tally.prompt_tokens == 12


def test_the_short_way_of_a_later_prompt_is_its_own() -> None:
    one = Answer(2)
    second = OffsetReply(one.reply, 1)
    words = TextTable(["x"])
    assert second.open_fast_path(0, words, None) is None
    one.reply.text(0, "a")
    second.text(0, "b")
    one.wire.merge_events()
    kept = array("I")
    lane = second.open_fast_path(0, words, kept)
    assert lane is not None
    assert lane.send_token(0)
    assert (one.told[-1], kept.tolist()) == ((1, "x", None), [0])
    other = second.open_fast_path(0, words, None)
    assert other is not None
    assert other.send_token(0)
    assert kept.tolist() == [0]
