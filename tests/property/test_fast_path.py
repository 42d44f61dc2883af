"""The token fast path sends what the normal path sends, however both alternate."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.application.exchange import Exchange
from dynamo.application.frontend_metrics import FrontendMetrics, TokenTiming
from dynamo.application.generation.replies import StreamReply
from dynamo.application.items import UsageCounter
from dynamo.application.openai.completions import COMPLETION_RESPONSE
from dynamo.application.openai.writer import OpenAIWriter
from dynamo.communication.http import Request
from dynamo.communication.http.response import Response
from dynamo.core.codec import ReplyDecoder, ReplyEncoder
from dynamo.core.fast_path import SendToken
from dynamo.core.text import TextOptions
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.scheduling.migration import ResumableReply
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary
from dynamo.telemetry.metrics import Registry

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class NormalPathReply(ResumableReply):
    """A reply without a fast path."""

    __slots__ = ()

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        return None


class FakeConnection:
    """A connection that keeps its output, event by event."""

    def __init__(self) -> None:
        self.output: list[bytes] = []
        self.pending_events: list[bytes] = []
        self.chunked = False

    def schedule_flush(self) -> None:
        """Nothing is sent before the test reads `output`."""

    def merge_events(self) -> None:
        self.output += self.pending_events
        self.pending_events.clear()

    def unsent_bytes(self) -> int:
        return 0


class Stream:
    """A streamed choice, from the payloads of a worker to SSE events."""

    def __init__(
        self, vocabulary: Vocabulary, options: TextOptions, reply_type: type[ResumableReply]
    ) -> None:
        self.connection = FakeConnection()
        self.response = Response(
            self.connection, "POST", "1.1", keep_alive=True, backlog_limit=1 << 20
        )
        ticks = itertools.count(1)
        self.metrics = FrontendMetrics(Registry()).for_model("m")
        self.timing = TokenTiming(self.metrics, lambda: float(next(ticks)), 0.0, 1)
        reply = StreamReply(
            Exchange(Request("POST", b"/", {}), self.response, "1", "1", ()),
            OpenAIWriter(COMPLETION_RESPONSE, "1", "m", 0, include_usage=True),
            UsageCounter(1),
            self.timing,
        )
        stops = StopStrings(options.stop) if options.stop else None
        self.resumable = reply_type(Detokeniser(0, vocabulary, options, stops, reply))
        self.reader = ReplyDecoder(self.resumable)
        self.writer = ReplyEncoder(self._deliver)
        self.wants_more = True

    def _deliver(self, payload: bytes) -> bool:
        if self.wants_more:
            self.wants_more = self.reader.feed(payload)
        return self.wants_more

    def answer(self, chunks: Sequence[tuple[int, list[int]]]) -> tuple[Any, ...]:
        self.writer.begin(Started())
        for kind, ids in chunks:
            if kind == 2:
                self.response.congested = not self.response.congested
                if not self.response.congested and self.response.on_writable is not None:
                    self.response.on_writable()
            extra = [TokenLogprobs(token, -0.5) for token in ids] if kind == 1 else None
            if not self.writer.tokens(ids, extra):
                break
        if self.wants_more:
            self.writer.finish(Finish("length", len(self.resumable.token_log)))
        self.connection.merge_events()
        self.timing.flush()
        output = self.connection.output
        sent = [item for item in output if not item.startswith(b"HTTP/")]  # heads contain a date
        token_ids = list(self.resumable.token_log)
        return sent, token_ids, self.timing.recorded_texts, self.reader.complete


single = st.lists(st.integers(0, 620), min_size=1, max_size=1)
several = st.lists(st.integers(0, 620), min_size=1, max_size=3)
chunk = st.tuples(st.sampled_from([0] * 12 + [1, 2]), st.one_of(single, single, several))


@shared
@given(
    chunks=st.lists(chunk, max_size=90),
    stop=st.sampled_from([(), (), ("e",), ("th", "ab")]),
    skip=st.booleans(),
    least=st.integers(0, 5),
)
def test_both_paths_send_the_same(
    vocabulary: Vocabulary,
    chunks: list[tuple[int, list[int]]],
    stop: tuple[str, ...],
    skip: bool,
    least: int,
) -> None:
    options = TextOptions(stop=stop, skip_special_tokens=skip, min_tokens=least)
    short = Stream(vocabulary, options, ResumableReply).answer(chunks)
    assert short == Stream(vocabulary, options, NormalPathReply).answer(chunks)


def test_the_fast_path_is_used(vocabulary: Vocabulary) -> None:
    plain = next(i for i, text in enumerate(vocabulary.token_texts.texts) if text)
    stream = Stream(vocabulary, TextOptions(), ResumableReply)
    long: list[Sequence[int]] = []
    stream.writer.begin(Started())
    for _ in range(5):
        before = len(stream.resumable.token_log)
        stream.writer.tokens([plain])
        assert len(stream.resumable.token_log) == before + 1
        long.append(stream.connection.pending_events[-1])
    fast_path = stream.resumable._reply._fast_path  # type: ignore[attr-defined]
    assert fast_path.tokens_sent == 3
    assert stream.resumable.token_log == array("I", [plain] * 5)


def test_a_stop_string_of_one_request_does_not_stop_another(vocabulary: Vocabulary) -> None:
    a, e = vocabulary.token_texts.texts.index("a"), vocabulary.token_texts.texts.index("e")
    chunks = [(0, [token]) for token in (a, a, a, a, e, a)]
    assert len(Stream(vocabulary, TextOptions(), ResumableReply).answer(chunks)[1]) == 6
    assert len(Stream(vocabulary, TextOptions(stop=("e",)), ResumableReply).answer(chunks)[1]) == 5
