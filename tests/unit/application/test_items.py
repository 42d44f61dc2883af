"""Items of an answer: their order, congestion, long silence and early ends."""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar

import pytest
from tests.unit.application.test_replies import FakeConnection

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics, TokenTiming
from dynamo.application.generation.replies import HttpReply, StreamReply, UnaryReply
from dynamo.application.items import AnswerItem, ItemKind, ItemWriter, UsageCounter
from dynamo.communication.http import Request
from dynamo.communication.http.response import Response
from dynamo.core.errors import InternalError, ProtocolError, SlowReader
from dynamo.core.text import (
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    DecodedTokenLogprob,
    ReasoningDelta,
    RefusalDelta,
    TextFinish,
)
from dynamo.core.values import Started
from dynamo.telemetry.metrics import Registry

END = TextFinish("stop", 3, reasoning_tokens=1)


class LineWriter(ItemWriter):
    """Writes each event as a line of words."""

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset({"reasoning", "text", "call"})

    def encode_start(self) -> bytes:
        return b"start %d\n" % self.usage.prompt_tokens

    def begin_item(self, item: AnswerItem) -> bytes:
        return f"+{item.index} {item.kind}{item.name}\n".encode()

    def encode_delta(self, item: AnswerItem, delta: str, logprobs: Any) -> bytes:
        return f"{item.index} {delta} {len(logprobs)}\n".encode()

    def encode_item_ended(self, item: AnswerItem) -> bytes:
        return f"-{item.index} {item.text} {item.complete}\n".encode()

    def encode_end(self) -> bytes:
        [choice] = self.choices
        tokens = self.usage.completion_tokens
        return f"end {len(choice.items)} {choice.end.reason} {tokens}\n".encode()

    def encode_answer(self) -> bytes:
        items = self.choices[0].items
        return json.dumps([[item.kind, item.name, item.text] for item in items]).encode()


class HeldWriter(LineWriter):
    """Holds the end back."""

    holds_end = True


class FrameWriter(LineWriter):
    """Writes deltas by frames, and keeps none."""

    kept_kinds: ClassVar[frozenset[ItemKind]] = frozenset()

    def begin_item(self, item: AnswerItem) -> bytes:
        item.frame = (b"<", b">\n") if item.kind == "text" else (b"<", b"|", b">\n")
        return super().begin_item(item)


class Answer:
    """A reply, and what it sent."""

    def __init__(
        self,
        reply_type: type[HttpReply] = StreamReply,
        limit: int = 1 << 20,
        *,
        writer: ItemWriter | None = None,
        begins: bool = True,
        tokens: int = 5,
    ) -> None:
        self.connection = FakeConnection()
        self.response = Response(
            self.connection, "POST", "1.1", keep_alive=True, backlog_limit=limit
        )
        ticks = itertools.count(1)
        metrics = FrontendMetrics(Registry()).for_model("m")
        self.timing = TokenTiming(metrics, lambda: float(next(ticks)), 0.0, 1)
        exchange = Exchange(Request("POST", b"/", {}), self.response, "1", "1", ())
        self.reply = reply_type(exchange, writer or LineWriter(), UsageCounter(1), self.timing)
        self.reply.prompt(tokens)
        if begins:
            self.reply.begin(0, Started("w"))

    @property
    def lines(self) -> list[str]:
        self.connection.merge_events()
        body = b"".join(data for data in self.connection.output if not data.startswith(b"HTTP/"))
        return body.decode().removesuffix("0\r\n\r\n").splitlines()


def answer_all(reply: HttpReply) -> None:
    reply.event(0, ReasoningDelta("a"))
    reply.event(0, ReasoningDelta("b"))
    reply.text(0, "c")
    reply.event(0, CallBegun(0, "call_1", "f"))
    reply.event(0, ArgumentsDelta(0, "{}"))
    reply.event(0, CallEnded(0))
    reply.text(0, "d")
    reply.event(0, CallBegun(1, "call_2", "g"))
    reply.event(0, ArgumentsDelta(1, "{"))
    reply.finish(0, END)


async def test_items_are_streamed_one_after_another() -> None:
    answer = Answer()
    answer_all(answer.reply)
    answer.reply.check_complete()
    assert answer.lines == [
        "start 5",
        *("+0 reasoning", "0 a 0", "0 b 0", "-0 ab True"),
        *("+1 text", "1 c 0", "-1 c True"),
        *("+2 callf", "2 {} 0", "-2 {} True"),
        *("+3 text", "3 d 0", "-3 d True"),
        *("+4 callg", "4 { 0", "-4 { False"),
        "end 5 stop 3",
    ]


async def test_a_whole_answer_has_all_items() -> None:
    answer = Answer(UnaryReply)
    answer_all(answer.reply)
    answer.reply.check_complete()
    items = [["reasoning", "", "ab"], ["text", "", "c"], ["call", "f", "{}"], ["text", "", "d"]]
    items.append(["call", "g", "{"])
    assert json.loads(answer.lines[0]) == items


async def test_deltas_are_merged_while_the_client_does_not_read() -> None:
    answer = Answer()
    token = DecodedTokenLogprob("c", b"c", -1.0)
    answer.reply.text(0, "a")
    answer.response.congested = True
    answer.reply.text(0, "b", [token])
    answer.reply.text(0, "c", [token])
    assert answer.lines == ["start 5", "+0 text", "0 a 0"]
    answer.response.congested = False
    assert answer.response.on_writable is not None
    answer.response.on_writable()
    assert answer.lines[3:] == ["0 bc 2"]
    answer.response.congested = True
    answer.reply.text(0, "d")
    answer.reply.event(0, CallBegun(0, "call_1", "f"))
    assert answer.lines[4:] == ["0 d 0", "-0 abcd True", "+1 callf"]


@pytest.mark.parametrize("delta", ["text", "call"])
async def test_a_client_that_reads_too_slowly_ends_the_stream(delta: str) -> None:
    answer = Answer(limit=1000)
    answer.reply.text(0, "a")
    answer.response.congested = True
    if delta == "text":
        assert answer.reply.text(0, "b" * 500)
        assert not answer.reply.text(0, "b" * 600)
    else:
        answer.connection.pending_events.append(b"x" * 2000)
        assert not answer.reply.event(0, CallBegun(0, "call_1", "f"))
    with pytest.raises(SlowReader):
        answer.reply.check_complete()


async def test_silence_is_broken_by_the_head_and_by_comments() -> None:
    """Also in the middle of an answer. Output since the last check ends a silence."""
    answer = Answer(begins=False)
    answer.response.check_silence(10.0, 0)
    assert not answer.response.started
    answer.response.check_silence(10.5, 0)
    assert answer.lines == ["start 5"]
    answer.reply.begin(0, Started("w"))
    answer.reply.text(0, "a")
    answer.response.check_silence(20.0, 99)
    for now in (21.0, 33.0, 34.0):
        answer.response.check_silence(now, 99)
    assert answer.lines[1:] == ["+0 text", "0 a 0", ": keep-alive"]
    answer.response.check_silence(34.5, 110)
    answer.response.check_silence(35.0, 110)
    answer.reply.finish(0, END)
    assert answer.lines[4:] == ["-0 a True", "end 1 stop 3"]
    assert answer.response.on_silence is None


async def test_an_answer_without_items_and_one_that_ends_early() -> None:
    answer = Answer()
    with pytest.raises(InternalError):
        answer.reply.check_complete()
    answer.reply.finish(0, END)
    assert answer.lines == ["start 5", "end 0 stop 3"]
    whole = Answer(UnaryReply)
    whole.reply.finish(0, END)
    assert whole.lines == ["[]"]


async def test_a_part_of_a_call_that_has_ended_is_an_error() -> None:
    reply = Answer().reply
    reply.event(0, CallBegun(0, "call_1", "f"))
    reply.event(0, CallBegun(1, "call_2", "g"))
    with pytest.raises(ProtocolError, match="tool call 0"):
        reply.event(0, ArgumentsDelta(0, "{"))


async def test_items_that_are_not_streamed_may_begin_anew() -> None:
    answer = Answer(UnaryReply)
    answer.reply.text(0, "a")
    answer.reply.event(0, CallBegun(0, "call_1", "f"))
    assert answer.reply.restart(0)
    answer.reply.event(0, CallBegun(0, "call_2", "g"))
    answer.reply.event(0, ArgumentsDelta(0, "{}"))
    answer.reply.event(0, CallEnded(0))
    answer.reply.event(0, RefusalDelta("no"))
    answer.reply.finish(0, END)
    assert json.loads(answer.lines[-1]) == [["call", "g", "{}"], ["text", "", "no"]]
    streamed = Answer()
    streamed.reply.text(0, "a")
    assert not streamed.reply.restart(0)


async def test_frames_write_deltas_around_their_json_strings() -> None:
    answer = Answer(writer=FrameWriter())
    answer.reply.event(0, ReasoningDelta('a"'))
    answer.reply.text(0, "b")
    answer.response.congested = True
    answer.reply.text(0, "c")
    answer.reply.text(0, "d")
    assert answer.response.on_writable is not None
    answer.response.on_writable()
    answer.response.congested = False
    answer.reply.text(0, "e", [DecodedTokenLogprob("e", b"e", -1.0)])
    answer.reply.finish(0, END)
    assert answer.lines == [
        *("start 5", "+0 reasoning", '<"a\\""|"a\\"">', "-0  True"),
        *("+1 text", '<"b">', '<"cd">', "1 e 1", "-1  True", "end 2 stop 3"),
    ]


@pytest.mark.parametrize("reply_type", [StreamReply, UnaryReply])
async def test_a_held_end_is_sent_later(reply_type: type[HttpReply]) -> None:
    answer = Answer(reply_type, writer=HeldWriter())
    answer.reply.text(0, "a")
    answer.reply.finish(0, END)
    answer.reply.check_complete()
    assert not answer.response.ended
    answer.reply.send_end()
    assert answer.response.ended
    assert answer.lines[-1] in {"end 1 stop 3", '[["text", "", "a"]]'}
