"""Replies that send an answer's items as an event stream or as one JSON answer."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence

from dynamo.application.exchange import EventOutput, Exchange, worker_headers
from dynamo.application.frontend_metrics import TokenTiming
from dynamo.application.generation.fast_path import JSON_STRINGS, StreamFastPath
from dynamo.application.items import (
    AnswerChoice,
    AnswerItem,
    ItemReply,
    ItemWriter,
    Logprobs,
    TokenLogprobs,
    UsageCounter,
)
from dynamo.core.errors import InternalError, SlowReader, TooLarge
from dynamo.core.fast_path import FastPath, TextTable
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.text import AnswerEvent, DecodedPromptToken, TextFinish, TextReply
from dynamo.core.values import Started

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


class HttpReply(ItemReply):
    """The common part of replies to one HTTP request; `remaining_choices` have not ended.

    A stream that waits sends its head early if `accepted`: all prompts were checked, or a place to
    check them is waited for. An error before the head has an HTTP status. Before a worker has
    begun, the head waits for `hold_s`.
    """

    def __init__(
        self,
        exchange: Exchange,
        writer: ItemWriter,
        usage: UsageCounter,
        timing: TokenTiming,
        prompts: int = 1,
    ) -> None:
        super().__init__(usage, prompts * usage.choices_per_prompt)
        writer.choices, writer.usage = self.choices, usage
        self.accepted, self.hold_s = False, 0.0
        self.interleaves_calls = writer.interleaves_calls
        self.shows_refusals = writer.shows_refusals
        self._exchange = exchange
        self._response: EventOutput = exchange.output
        self._begun = exchange.output is not exchange.response
        self._writer = writer
        self._timing = timing
        self._encoded_bytes = self._logprob_count = 0
        self._unencoded_prompts = prompts
        self._response.on_silence = self.break_silence

    def prompt(self, prompt_tokens: int, repeated_bytes: int = 0) -> None:
        self._unencoded_prompts -= 1
        if self._unencoded_prompts <= 0:
            self.accepted = True
            hold = self._exchange.request.hold
            if hold is not None:
                hold.release()
        self._usage.prompt_tokens += prompt_tokens
        self._encoded_bytes += TOKEN_BYTES * prompt_tokens + ECHO_COPIES * repeated_bytes
        if self._encoded_bytes > MAX_ENCODED_BYTES:
            raise TooLarge(
                f"{self._usage.prompt_tokens:,} tokens and the texts that choices "
                f"repeat take {self._encoded_bytes:,} bytes, limit {MAX_ENCODED_BYTES:,}",
                hint="send fewer prompts in a request, or no echo with a large n",
                field="prompt",
            )

    def event(self, choice: int, event: AnswerEvent) -> bool:
        self._timing.on_text(choice)
        return super().event(choice, event) and self._response.open

    def prompt_logprobs(self, choice: int, tokens: Sequence[DecodedPromptToken]) -> None:
        super().prompt_logprobs(choice, tokens)
        self._count_logprobs(tokens)

    def _count_logprobs(self, logprobs: TokenLogprobs | Sequence[DecodedPromptToken]) -> None:
        """Count the logprobs that are held until the answer ends. Raises `TooLarge`."""
        self._logprob_count += sum(1 + len(token.top) for token in logprobs)
        if self._logprob_count > MAX_LOGPROBS:
            raise TooLarge(
                f"the answer has more than {MAX_LOGPROBS:,} logprobs",
                hint="stream the answer, or ask for fewer choices, tokens or top logprobs",
                field="top_logprobs",
            )

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: Logprobs = None) -> bool:
        super()._add_delta(item, delta, logprobs)
        if logprobs:
            self._count_logprobs(logprobs)
        return self._response.open

    def break_silence(self, silent_s: float) -> None:
        """Do something against the silence of an answer, where that is possible."""

    @abstractmethod
    def send_end(self) -> None:
        """Send the whole answer, or the last events of a stream."""

    def check_complete(self) -> None:
        """Raise an error if the processor returned before the end: the client's or the server's."""
        if self._response.overrun:
            raise SlowReader(
                "the stream's backlog overflowed because the client reads too slowly",
                hint="limits: server.stream_backlog_bytes, server.stall_s",
            )
        if self.remaining_choices and self._response.open:
            raise InternalError("the answer ended early")


class UnaryReply(HttpReply):
    """Sends one JSON answer when the last choice has ended."""

    def text(self, choice: int, delta: str, logprobs: Logprobs = None) -> bool:
        self._timing.on_text(choice)
        item = self.choices[choice].current
        if logprobs is not None or item is None or item.kind != "text":
            return super().text(choice, delta, logprobs)
        item.deltas.append(delta)
        return self._response.open

    def finish(self, choice: int, end: TextFinish) -> None:
        super().finish(choice, end)
        if self.remaining_choices == 0 and not self._writer.holds_end:
            self.send_end()

    def send_end(self) -> None:
        usage = self._usage
        headers = worker_headers(usage.worker, usage.prefill_worker)
        self._exchange.send_json(200, self._writer.encode_answer(), headers)


def write_keep_alive(response: EventOutput, silent_s: float) -> None:
    """Write a comment line into a stream that has been silent for long."""
    if silent_s >= KEEP_ALIVE_S:
        response.write(KEEP_ALIVE)


def keep_waiting(exchange: Exchange, silent_s: float) -> None:
    """Send the head and comment lines of a stream whose model is loaded for long."""
    if silent_s >= KEEP_ALIVE_S:
        exchange.start_stream("")
        exchange.response.write(KEEP_ALIVE)


class StreamReply(HttpReply):
    """Writes every delta as one event; deltas are merged only while the client does not read.

    The response head is sent with the first item, or by `break_silence`. `_unsent_bytes` are those
    of all choices.
    """

    _unsent_bytes = 0

    def text(self, choice: int, delta: str, logprobs: Logprobs = None) -> bool:
        self._timing.on_text(choice)
        answer = self.choices[choice]
        item = answer.current
        if item is None or item.kind != "text":
            item = self._begin_item(answer, AnswerItem(choice, len(answer.items), "text"))
        response = self._response
        if logprobs is not None or response.congested or not item.frame:
            return self._add_delta(item, delta, logprobs)
        before, after = item.frame
        return response.write(before + JSON_STRINGS[delta] + after)

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: array[int] | None
    ) -> FastPath | None:
        item = self.choices[choice].current
        if item is None or item.kind != "text" or not item.frame:
            return None
        token_log = array("I") if token_log is None else token_log
        response = self._exchange.response
        return StreamFastPath(choice, response, item.frame, self._timing, text_table, token_log)

    def restart(self, choice: int) -> bool:
        del choice
        return False

    def break_silence(self, silent_s: float) -> None:
        """Send the head of a stream that waits, later comment lines: proxies and clients give up
        connections without output."""
        if self._begun:
            write_keep_alive(self._response, silent_s)
            return
        decided = silent_s >= self.hold_s or self._usage.worker
        if (self.accepted and decided) or silent_s >= KEEP_ALIVE_S:
            self._start_stream()

    def _start_stream(self) -> None:
        usage, self._begun = self._usage, True
        self._exchange.start_stream(usage.worker, usage.prefill_worker)
        if start := self._writer.encode_start():
            self._response.write(start)

    def _begin_choice(self, answer: AnswerChoice) -> None:
        answer.begun = True
        if not self._begun:
            self._start_stream()
        if events := self._writer.encode_choice_begun(answer.index):
            self._response.write(events)

    def _begin_item(self, answer: AnswerChoice, item: AnswerItem) -> AnswerItem:
        if not answer.begun:
            self._begin_choice(answer)
        super()._begin_item(answer, item)
        if events := self._writer.begin_item(item):
            self._check_backlog()
            self._response.write(events)
        return item

    def _add_delta(self, item: AnswerItem, delta: str, logprobs: Logprobs = None) -> bool:
        if item.kind in self._writer.kept_kinds:
            super()._add_delta(item, delta, logprobs)
        response, answer = self._response, self.choices[item.choice]
        if not response.congested or item is not answer.current:
            return self._write_delta(item, delta, logprobs)
        size = len(delta) + 64 * len(logprobs or ())
        answer.unsent.append(delta)
        answer.unsent_logprobs += logprobs or ()
        answer.unsent_bytes += size
        self._unsent_bytes += size
        response.on_writable = self._write_unsent
        self._check_backlog()
        return response.open

    def _write_delta(self, item: AnswerItem, delta: str, logprobs: Logprobs) -> bool:
        if item.frame and logprobs is None:
            return self._response.write(JSON_STRINGS[delta].join(item.frame))
        return self._response.write(self._writer.encode_delta(item, delta, logprobs or ()))

    def _end_item(self, answer: AnswerChoice, item: AnswerItem) -> None:
        if answer.unsent:
            self._write_unsent_of(answer, item)
        answer.current = None
        if events := self._writer.encode_item_ended(item):
            self._response.write(events)

    def _check_backlog(self) -> None:
        """Cut off a client that does not read although its limit is reached."""
        response = self._response
        if (
            response.congested
            and self._unsent_bytes + response.backlog_bytes > response.backlog_limit
        ):
            response.overrun, response.open = True, False

    def _write_unsent(self) -> None:
        for answer in self.choices:
            if answer.unsent and answer.current is not None:
                self._write_unsent_of(answer, answer.current)

    def _write_unsent_of(self, answer: AnswerChoice, item: AnswerItem) -> None:
        delta, logprobs = "".join(answer.unsent), answer.unsent_logprobs
        self._unsent_bytes -= answer.unsent_bytes
        answer.unsent, answer.unsent_logprobs, answer.unsent_bytes = [], [], 0
        self._write_delta(item, delta, logprobs or None)

    def finish(self, choice: int, end: TextFinish) -> None:
        answer = self.choices[choice]
        if not answer.begun:
            self._begin_choice(answer)
        super().finish(choice, end)
        if events := self._writer.encode_choice_ended(answer):
            self._response.write(events)
        if self.remaining_choices == 0 and not self._writer.holds_end:
            self.send_end()

    def send_end(self) -> None:
        if not self._response.overrun:
            self._response.end(self._writer.encode_end())


class CountedStreamReply(StreamReply):
    """Writes the tokens so far into each event: vLLM's `continuous_usage_stats`. The processor
    counts them for the reply."""

    def begin(self, choice: int, started: Started) -> None:
        super().begin(choice, started)
        self.count_tokens(choice, 0)

    def count_tokens(self, choice: int, tokens: int) -> None:
        answer = self.choices[choice]
        if tokens and not answer.begun:
            self._begin_choice(answer)  # its event comes before the first token
        answer.tokens += tokens
        self._writer.show_usage(sum(choice.tokens for choice in self.choices))

    def finish(self, choice: int, end: TextFinish) -> None:
        self.count_tokens(choice, end.completion_tokens - self.choices[choice].tokens)
        super().finish(choice, end)


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

    def text(self, choice: int, delta: str, logprobs: Logprobs = None) -> bool:
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
