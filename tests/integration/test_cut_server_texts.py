"""Texts of servers with an OpenAI API that end inside a character."""

from __future__ import annotations

import pytest
from tests.integration.test_servers_with_text import (
    CONTEXT,
    DONE,
    MESSAGES,
    RecordedText,
    delta,
    processor_at,
)
from tests.support.fake_openai_server import events, served

from dynamo.core.clock import SystemClock
from dynamo.core.text import ChatRequest, TextDelta
from dynamo.core.values import EngineTotals, GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.openai_server.completion import CompletionAnswer
from dynamo.scheduling.processor.text_processor import TextAnswerReply
from dynamo.testing.fakes import CollectedReply


@pytest.mark.parametrize(
    ("deltas", "reason", "expected"),
    [
        (["a", "\ufffd"], "length", ["a"]),
        (["a\ufffd", "\ufffd"], "length", ["a"]),
        (["a\ufffd", "b"], "length", ["a", "\ufffdb"]),
        (["a\ufffd"], "stop", ["a", "\ufffd"]),
        (["\ufffd" * 5, "\ufffd"], "length", ["\ufffd" * 2, "\ufffd"]),
    ],
)
async def test_a_text_that_is_cut_inside_a_character_ends_before_it(
    deltas: list[str], reason: str, expected: list[str]
) -> None:
    async with served() as fake:
        parts = [delta(text) for text in deltas]
        fake.answers["/v1/chat/completions"] = (
            200,
            "",
            events(*parts, delta("", reason)) + DONE,
        )
        reply = RecordedText()
        async with processor_at(fake) as processor:
            await processor.chat(ChatRequest("m", MESSAGES), CONTEXT, reply)
    assert reply.parts == expected


@pytest.mark.parametrize(("reason", "expected"), [("length", "ab"), ("stop", "ab\ufffd")])
def test_a_completion_that_is_cut_inside_a_character_ends_before_it(
    reason: str, expected: str
) -> None:
    request, reply = (
        GenerateRequest("r", "m", b"", SamplingParams(), StopConditions()),
        CollectedReply(),
    )
    answer = CompletionAnswer(
        request,
        reply,
        EngineTotals(),
        SystemClock(),
        vocab_size=0,
        encode=lambda text: [*map(ord, text)],
    )
    parts = [{"text": "a"}, {"text": "b\ufffd"}, {"text": "", "finish_reason": reason}]
    answer.on_data(events(*({"choices": [part]} for part in parts)) + DONE)
    assert "".join(map(chr, reply.ids)) == expected


class UnseenText(RecordedText):
    """A reply whose client has nothing yet."""

    def restart(self, choice: int) -> bool:
        del choice
        self.parts.clear()
        return True


def test_an_answer_that_begins_anew_has_nothing_of_the_one_before() -> None:
    reply = UnseenText()
    answer = TextAnswerReply(0, reply, "")
    answer.text(TextDelta("a\ufffd"))
    assert answer.restart()
    answer.text(TextDelta("b"))
    assert reply.parts == ["b"]
