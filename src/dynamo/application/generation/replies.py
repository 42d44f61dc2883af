"""Replies that turn the processor's text into an event stream or one JSON answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.application.exchange import EventOutput, Exchange, worker_headers
from dynamo.application.generation.fast_path import EventTemplate, StreamFastPath
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.openai.answer_parts import AnswerParts
from dynamo.application.openai.response_encoder import DONE_EVENT, JsonStringCache, ResponseEncoder
from dynamo.application.openai.usage import UsageCounter
from dynamo.communication.http import BodyHold
from dynamo.core.errors import InternalError, SlowReader, TooLarge
from dynamo.core.fast_path import FastPath, TextTable
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.text import (
    AnswerEvent,
    DecodedPromptToken,
    DecodedTokenLogprob,
    TextFinish,
    TextReply,
)
from dynamo.core.values import Started

TokenLogprobs = Sequence[DecodedTokenLogprob]

MAX_ENCODED_BYTES = 32 << 20
"""Budget of one request: the packed prompts, and the prompts' texts that choices repeat."""
ECHO_COPIES = 8
"""A repeated text counts so many times. Text, answer and its encoding are held together."""

MAX_LOGPROBS = 1 << 17
"""Logprobs of an answer that is not streamed, 400 bytes each while it is encoded."""


KEEP_ALIVE = b": keep-alive\n"
"""A comment line. No empty line follows, which some clients take for an event without data."""
KEEP_ALIVE_S = 14.0
"""A stream that was silent for so long sends KEEP_ALIVE. The server notices that within a second:
no 15 s pass without output."""
MAX_HOLD_S = 5.0
"""A head waits so long at most for admission, which rejects requests within `router.ttft_slo`."""


class PendingText(msgspec.Struct):
    """Text of one choice that waits for a congested connection; `size` counts bytes roughly."""

    size: int = 0
    texts: list[str] = []
    logprobs: list[DecodedTokenLogprob] = []


class HttpReply(TextReply):
    """The common part of replies to one HTTP request; `remaining_choices` have not ended.

    A stream that waits sends its head early if `accepted`: all prompts were checked, or a place to
    check them is waited for. An error before the head has an HTTP status. Before a worker has
    begun, the head waits for `hold_s`.
    """

    __slots__ = (
        "_encoded_bytes",
        "_hold",
        "_logprob_count",
        "_response",
        "_unencoded_prompts",
        "_usage_counter",
        "accepted",
        "hold_s",
        "remaining_choices",
    )

    def __init__(self, response: EventOutput, usage_counter: UsageCounter, choices: int) -> None:
        self.accepted, self.hold_s = False, 0.0
        self._response = response
        self._usage_counter = usage_counter
        self._hold: BodyHold | None = None
        self._encoded_bytes = self._logprob_count = self._unencoded_prompts = 0
        self.remaining_choices = choices

    def release_after(self, prompts: int, hold: BodyHold | None) -> None:
        """Release `hold`, the body's share of the budget, when all `prompts` are encoded."""
        self._unencoded_prompts, self._hold = prompts, hold

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self._unencoded_prompts -= 1
        if self._unencoded_prompts <= 0:
            self.accepted = True
            if self._hold is not None:
                self._hold.release()
        self._usage_counter.prompt_tokens += prompt_tokens
        self._encoded_bytes += TOKEN_BYTES * prompt_tokens + ECHO_COPIES * repeated_bytes
        if self._encoded_bytes > MAX_ENCODED_BYTES:
            raise TooLarge(
                f"{self._usage_counter.prompt_tokens:,} tokens and the texts that choices "
                f"repeat take {self._encoded_bytes:,} bytes, limit {MAX_ENCODED_BYTES:,}",
                hint="send fewer prompts in a request, or no echo with a large n",
                field="prompt",
            )

    def begin(self, choice: int, started: Started) -> None:
        self._usage_counter.on_started(choice, started)

    def count_logprobs(self, logprobs: TokenLogprobs | Sequence[DecodedPromptToken]) -> None:
        """Count the logprobs that are held until the answer ends. Raises `TooLarge`."""
        self._logprob_count += sum(1 + len(token.top) for token in logprobs)
        if self._logprob_count > MAX_LOGPROBS:
            raise TooLarge(
                f"the answer has more than {MAX_LOGPROBS:,} logprobs",
                hint="stream the answer, or ask for fewer choices, tokens or top logprobs",
                field="top_logprobs",
            )

    def check_complete(self) -> None:
        """Raise an error if the processor returned before the end: the client's or the server's."""
        if self._response.overrun:
            raise SlowReader(
                "the stream's backlog overflowed because the client reads too slowly",
                hint="limits: server.stream_backlog_bytes, server.stall_s",
            )
        if self.remaining_choices and self._response.open:
            raise InternalError("the answer ended early")

    def break_silence(self, silent_s: float) -> None:
        """Send the head of a stream that waits, later comment lines: proxies and clients give up
        connections without output."""
        if not self._response.started:
            decided = silent_s >= self.hold_s or self._usage_counter.worker
            if (self.accepted and decided) or silent_s >= KEEP_ALIVE_S:
                self._start_stream()
        else:
            write_keep_alive(self._response, silent_s)

    def _start_stream(self) -> None:
        """Send the head of the stream."""

    def close(self) -> None:
        """Release what outlives the request otherwise. The reply receives nothing any more."""
        self._response.on_silence = None


def write_keep_alive(response: EventOutput, silent_s: float) -> None:
    """Write a comment line into a stream that has been silent for long."""
    if silent_s >= KEEP_ALIVE_S:
        response.write(KEEP_ALIVE)


class StreamReply(HttpReply):
    """Writes every text as one event; texts are merged only while the client does not read.

    The response head is sent with the first text, or by `break_silence`.
    """

    __slots__ = (
        "_encoder",
        "_exchange",
        "_include_usage",
        "_json_strings",
        "_pending",
        "_pending_bytes",
        "_prefixes",
        "_suffix",
        "_timing",
    )

    def __init__(
        self,
        exchange: Exchange,
        encoder: ResponseEncoder,
        usage_counter: UsageCounter,
        timing: TokenTiming,
        json_strings: JsonStringCache,
        *,
        choices: int,
        include_usage: bool,
    ) -> None:
        super().__init__(exchange.response, usage_counter, choices)
        self._exchange = exchange
        self._encoder = encoder
        self._timing = timing
        self._json_strings = json_strings
        self._include_usage = include_usage
        self._suffix = encoder.text_suffix
        self._prefixes: list[bytes | None] = [None] * choices
        self._pending: dict[int, PendingText] = {}
        self._pending_bytes = 0
        exchange.response.on_silence = self.break_silence

    def text(self, choice: int, delta: str, logprobs: TokenLogprobs | None = None) -> bool:
        self._timing.on_text(choice)
        prefix = self._prefixes[choice] or self._start_choice(choice)
        response = self._response
        if response.congested:
            return self._buffer_text(choice, delta, logprobs)
        if logprobs is None:
            return response.write(prefix + self._json_strings[delta] + self._suffix)
        return response.write(self._encoder.encode_text_chunk(choice, delta, logprobs))

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: array[int] | None
    ) -> FastPath | None:
        prefix = self._prefixes[choice]
        if prefix is None:
            return None
        token_log = array("I") if token_log is None else token_log
        template = EventTemplate(prefix, self._json_strings, self._suffix)
        response = self._exchange.response
        return StreamFastPath(choice, response, template, self._timing, text_table, token_log)

    def event(self, choice: int, event: AnswerEvent) -> bool:
        chunk = self._encoder.encode_event_chunk(choice, event)
        if not chunk:
            return self._response.open
        self._timing.on_text(choice)
        if self._prefixes[choice] is None:
            self._start_choice(choice)
        if choice in self._pending:
            self._flush_choice(choice)
        response = self._response
        if response.congested and response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.write(chunk)

    def finish(self, choice: int, end: TextFinish) -> None:
        if self._prefixes[choice] is None:
            self._start_choice(choice)
        if choice in self._pending:
            self._flush_choice(choice)
        self._usage_counter.on_finished(end)
        self._response.write(self._encoder.encode_finish_chunk(choice, end))
        self.remaining_choices -= 1
        if self.remaining_choices == 0 and not self._response.overrun:
            tail = DONE_EVENT
            if self._include_usage:
                tail = self._encoder.encode_usage_chunk(self._usage_counter) + tail
            self._response.end(tail)

    def _start_stream(self) -> None:
        usage = self._usage_counter
        self._exchange.start_stream(usage.worker, usage.prefill_worker)

    def _start_choice(self, choice: int) -> bytes:
        if not self._response.started:
            self._start_stream()
        first_chunk = self._encoder.encode_first_chunk(choice)
        if first_chunk:
            self._response.write(first_chunk)
        prefix = self._prefixes[choice] = self._encoder.text_prefix(choice)
        return prefix

    def _buffer_text(self, choice: int, delta: str, logprobs: TokenLogprobs | None) -> bool:
        response = self._response
        pending = self._pending.get(choice)
        if pending is None:
            pending = self._pending[choice] = PendingText()
        pending.texts.append(delta)
        size = len(delta)
        if logprobs is not None:
            pending.logprobs += logprobs
            size += 64 * len(logprobs)
        pending.size += size
        self._pending_bytes += size
        response.on_writable = self._flush_pending
        if self._pending_bytes + response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.open

    def _flush_choice(self, choice: int) -> None:
        pending = self._pending.pop(choice)
        self._pending_bytes -= pending.size
        self._write_pending(choice, pending)

    def _flush_pending(self) -> None:
        for choice, pending in self._pending.items():
            self._write_pending(choice, pending)
        self._pending.clear()
        self._pending_bytes = 0

    def _write_pending(self, choice: int, pending: PendingText) -> None:
        text, encoder = "".join(pending.texts), self._encoder
        if pending.logprobs:
            self._response.write(encoder.encode_text_chunk(choice, text, pending.logprobs))
        else:
            prefix = encoder.text_prefix(choice)
            self._response.write(prefix + self._json_strings[text] + self._suffix)


class UnaryReply(HttpReply):
    """Collects all text and sends one JSON answer when the last choice has ended."""

    def __init__(
        self,
        exchange: Exchange,
        encoder: ResponseEncoder,
        usage_counter: UsageCounter,
        timing: TokenTiming,
        *,
        choices: int,
    ) -> None:
        super().__init__(exchange.response, usage_counter, choices)
        self._exchange = exchange
        self._encoder = encoder
        self._timing = timing
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[DecodedTokenLogprob] | None] = [None] * choices
        self._parts: dict[int, AnswerParts] = {}
        self._ends: list[TextFinish | None] = [None] * choices

    def text(self, choice: int, delta: str, logprobs: TokenLogprobs | None = None) -> bool:
        self._timing.on_text(choice)
        self._texts[choice].append(delta)
        if logprobs is not None:
            collected = self._logprobs[choice]
            if collected is None:
                collected = self._logprobs[choice] = []
            collected += logprobs
            self.count_logprobs(logprobs)
        return self._response.open

    def event(self, choice: int, event: AnswerEvent) -> bool:
        self._timing.on_text(choice)
        parts = self._parts.get(choice)
        if parts is None:
            parts = self._parts[choice] = AnswerParts()
        parts.add(event)
        return self._response.open

    def restart(self, choice: int) -> bool:
        self._texts[choice] = []
        self._logprobs[choice] = None
        self._parts.pop(choice, None)
        return True

    def finish(self, choice: int, end: TextFinish) -> None:
        self._usage_counter.on_finished(end)
        self._ends[choice] = end
        self.remaining_choices -= 1
        if self.remaining_choices:
            return
        answer = self._make_answer([end for end in self._ends if end is not None])
        usage = self._usage_counter
        headers = worker_headers(usage.worker, usage.prefill_worker)
        self._exchange.send_json(200, msgspec.json.encode(answer), headers)

    def _make_answer(self, ends: Sequence[TextFinish]) -> dict[str, Any]:
        texts = ["".join(parts) for parts in self._texts]
        usage = self._usage_counter
        return self._encoder.make_response(texts, self._logprobs, ends, usage, self._parts)


class OffsetReply(TextReply):
    """Passes one of several prompts on to `reply`, with its choices numbered from `offset`."""

    __slots__ = ("_offset", "_reply")

    def __init__(self, reply: TextReply, offset: int) -> None:
        self._reply = reply
        self._offset = offset

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self._reply.prompt(prompt_tokens, repeated_bytes)

    def begin(self, choice: int, started: Started) -> None:
        self._reply.begin(self._offset + choice, started)

    def text(self, choice: int, delta: str, logprobs: TokenLogprobs | None = None) -> bool:
        return self._reply.text(self._offset + choice, delta, logprobs)

    def restart(self, choice: int) -> bool:
        return self._reply.restart(self._offset + choice)

    def count_tokens(self, choice: int, tokens: int) -> None:
        self._reply.count_tokens(self._offset + choice, tokens)

    def prompt_logprobs(self, choice: int, tokens: Sequence[DecodedPromptToken]) -> None:
        self._reply.prompt_logprobs(self._offset + choice, tokens)

    def finish(self, choice: int, end: TextFinish) -> None:
        self._reply.finish(self._offset + choice, end)

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: array[int] | None
    ) -> FastPath | None:
        return self._reply.open_fast_path(self._offset + choice, text_table, token_log)
