"""The stream of another server's answer: its events, its usage, its end, and its errors."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from dynamo.communication.http.event_stream import DONE, EventStream, ServerEvent
from dynamo.core.clock import Clock
from dynamo.core.errors import MalformedAnswer, UpstreamFailed
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, FinishReason, GenerateRequest
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.openai_server.foreign_chunk import ForeignChoice, ForeignChunk, decode_chunk
from dynamo.inference.openai_server.foreign_values import (
    excerpt,
    read_count,
    read_object,
    read_word,
)

log = logging.getLogger(__name__)

MAX_SILENT_BYTES = 2 << 20
"""Most bytes of a stream between two parts of the answer."""
END_TIMEOUT_S = 2.0
"""A server may give the usage so long after the last part of an answer, and end its body."""
PART_SLACK = 1024
PARTS_PER_TOKEN = 4
"""Servers may give a token in several parts. An answer is cut beyond so many for each token."""
LENGTH_WORDS = frozenset(
    {"length", "max_tokens", "model_length", "max_output_tokens", "model_context_window_exceeded"}
)
FILTER_WORDS = ("content_filter", "content-filter", "safety", "recitation", "sensitive")
"""Beginnings of the words of a filter."""
FILTER_NAMES = frozenset({"blocklist", "prohibited_content", "spii", "image_safety", "refusal"})
FAILURE_WORDS = frozenset(
    {
        *("abort", "aborted", "error", "failed", "cancelled", "canceled", "timeout"),
        *("insufficient_system_resource", "network_error", "internal_error"),
        *("malformed_function_call",),
    }
)


class Usage:
    """Counts of tokens. A server sends them at the end of an answer, or with each part."""

    __slots__ = ("cached_tokens", "completion_tokens", "prompt_tokens", "reasoning_tokens")

    def __init__(self) -> None:
        self.completion_tokens = self.prompt_tokens = self.reasoning_tokens = 0
        self.cached_tokens: int | None = None

    def update(self, usage: Mapping[str, Any]) -> None:
        """Take the counts that a usage has."""
        prompt = read_object(usage.get("prompt_tokens_details"))
        answer = read_object(usage.get("completion_tokens_details"))
        cached = prompt.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.reasoning_tokens = _count(answer.get("reasoning_tokens"), self.reasoning_tokens)
        if (count := read_count(cached)) is not None:
            self.cached_tokens = count


class StreamedAnswer(ForeignAnswer, ABC):
    """Delivers the events of one answer."""

    def __init__(
        self,
        request: GenerateRequest,
        reply: Reply,
        totals: EngineTotals,
        clock: Clock,
        max_tokens: int = 0,
    ) -> None:
        """`max_tokens`: the length that the server was asked for, if the request does not say."""
        super().__init__(request, reply, totals)
        self.sent_s = clock.now()
        """When the request was sent."""
        self._max_tokens = max_tokens = max_tokens or request.stops.max_tokens
        self._max_parts = PARTS_PER_TOKEN * max_tokens + PART_SLACK
        self._events = EventStream(clock)
        self._silent_bytes = 0
        self._usage = Usage()
        self._reason = ""
        self.time_limit: asyncio.Timeout | None = None
        """The limit of the exchange, which has none until the answer is complete."""

    def on_data(self, part: bytes) -> bool:
        """Deliver a part of the body. False: the answer has ended. Raises `MalformedAnswer` for
        what is no event of an answer, and the error of an event as `event_error` returns it."""
        if self.ended:
            return self._skip(len(part))
        self._totals.steps += 1
        delivered = self.tokens
        for event in self._events.feed(part):
            if not self._on_event(event):
                return False
        if self.tokens > delivered:
            self._silent_bytes = 0
            return True
        return self._skip(len(part))

    def end(self) -> None:
        """End the answer with the body. Raises `MalformedAnswer` if it is not complete."""
        for event in () if self.ended else self._events.end():
            if not self._on_event(event):
                return
        if self.ended:
            return
        if not self._reason:
            line = self._events.unread
            shown = f": {excerpt(line)}" if line else ""
            what = "ended an answer" if self._begun else f"sent no completion{shown}: it ended"
            raise MalformedAnswer(f"the server {what} before it was complete")
        self._end()

    def end_if_complete(self) -> bool:
        """End the answer if only its connection broke behind its last part."""
        if not self.ended and self._reason:
            self._end()
        return self.ended

    @staticmethod
    @abstractmethod
    def _decode(data: bytes, kind: bytes) -> Any:
        """Return the event with this data and name. Raises `ValueError` for other data, and the
        error that the event is or has."""

    @abstractmethod
    def _deliver(self, chunk: Any) -> bool:
        """Deliver an event. False: the rest of the body is not wanted."""

    @abstractmethod
    def _finish(self, reason: FinishReason) -> None:
        """Finish the reply."""

    def _skip(self, size: int) -> bool:
        """Count bytes without a part of the answer. Returns whether to read on."""
        self._silent_bytes += size
        if self._silent_bytes <= MAX_SILENT_BYTES:
            return True
        if self.ended:
            return False
        text = f"the server sent {MAX_SILENT_BYTES} bytes without a part of the answer"
        raise MalformedAnswer(text)

    def _on_event(self, event: ServerEvent) -> bool:
        """Deliver an event. False: the rest of the body is not wanted."""
        kind, data = event
        if self.ended or not data:
            return True
        if data == DONE:
            if not self._reason and not self.tokens:
                raise MalformedAnswer("the server ended an answer without a finish_reason")
            self._end()
            return True  # the connection can be used again once the body ends
        try:
            chunk = self._decode(data, kind)
        except ValueError:
            if self._reason:
                return True
            raise no_completion(data) from None
        if not self._deliver(chunk):
            self.ended = True
            return False
        return True

    def _read_cached_tokens(self) -> int | None:
        """Return the prompt tokens from the server's cache, None if its usage does not tell."""
        cached, prompt = self._usage.cached_tokens, self.prompt_tokens or self._usage.prompt_tokens
        return cached if cached is None else min(cached, prompt)

    def _expect_end(self) -> None:
        """Wait only a little for what follows an answer."""
        limit, self.time_limit = self.time_limit, None
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time() + END_TIMEOUT_S)

    def _cut(self) -> bool:
        """End an answer that is longer than asked for. Returns False."""
        fields = {"max_tokens": self._max_tokens}
        log.warning("a server does not end its answer", extra={"fields": fields})
        self._reason = "length"
        self._end()
        return False

    def _end(self) -> None:
        if self.ended:
            return
        reason = _finish_reason(self._reason)
        self.ended = True
        self._silent_bytes = 0
        self._expect_end()
        self._finish(reason)


class ChoiceAnswer(StreamedAnswer):
    """Delivers the first choice of each event of a chat answer or a completion."""

    @abstractmethod
    def _deliver_choice(self, choice: ForeignChoice) -> bool:
        """Deliver a part of the choice. False: the reply has enough."""

    _decode = staticmethod(decode_chunk)

    def _deliver(self, chunk: ForeignChunk) -> bool:
        if chunk.usage:
            self._usage.update(read_object(chunk.usage))
        elif chunk.x_groq:
            self._usage.update(read_object(read_object(chunk.x_groq).get("usage")))
        if not chunk.choices:
            return True
        choice = chunk.choices[0]
        if choice.usage:
            self._usage.update(read_object(choice.usage))
        if not self._begun:
            self.begin()
        if not self._deliver_choice(choice):
            return False
        if self.tokens > self._max_parts:
            return self._cut()
        if choice.finish_reason and (reason := read_word(choice.finish_reason)):
            self._reason = reason
            self._expect_end()
        return True


def no_completion(data: bytes) -> MalformedAnswer:
    """Return the error for an event that is no part of an answer."""
    return MalformedAnswer(f"the server sent no completion: {excerpt(data)}")


def _count(value: Any, otherwise: int) -> int:
    count = read_count(value)
    return otherwise if count is None else count


def _finish_reason(word: str) -> FinishReason:
    """Return the reason that a server's word means. Unknown words mean an ordinary end. Raises
    `UpstreamFailed` for those of a failure."""
    name = word.lower()
    if name in FAILURE_WORDS:
        raise UpstreamFailed(f"the server ended an answer with finish_reason {word[:100]!r}")
    if name in LENGTH_WORDS:
        return "length"
    if name in FILTER_NAMES or name.startswith(FILTER_WORDS):
        return "content_filter"
    return "stop"
