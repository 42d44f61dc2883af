"""Where the processor's text goes: a stream of events, or one JSON answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dynamo.application.exchange import Exchange
from dynamo.application.generation.fast_path import EventTemplate, StreamFastPath
from dynamo.application.generation.token_timing import TokenTiming
from dynamo.application.openai.response_encoder import DONE_EVENT, JsonStringCache, ResponseEncoder
from dynamo.application.openai.usage import UsageCounter
from dynamo.core.errors import InternalError, SlowReader
from dynamo.core.fast_path import FastPath, TextTable
from dynamo.core.text import DecodedTokenLogprob, TextFinish, TextReply
from dynamo.core.values import Started

CompletionTokenLogprobs = Sequence[DecodedTokenLogprob]


class PendingText:
    """Text of one choice that a congested connection could not take."""

    __slots__ = ("logprobs", "size", "texts")

    def __init__(self) -> None:
        self.size = 0
        self.texts: list[str] = []
        self.logprobs: list[DecodedTokenLogprob] = []


class StreamReply(TextReply):
    """Every text is an event of its own; only while the client does not read, texts are merged.

    The head leaves with the first text, so that whatever fails before has its own status.
    `left`: choices that have not ended.
    """

    __slots__ = (
        "_encoder",
        "_exchange",
        "_include_usage",
        "_json_strings",
        "_pending",
        "_pending_bytes",
        "_prefixes",
        "_response",
        "_suffix",
        "_timing",
        "_usage_counter",
        "remaining_choices",
    )

    def __init__(
        self,
        exchange: Exchange,
        form: ResponseEncoder,
        tally: UsageCounter,
        pace: TokenTiming,
        escapes: JsonStringCache,
        *,
        choices: int,
        include_usage: bool,
    ) -> None:
        self._exchange = exchange
        self._response = exchange.response
        self._encoder = form
        self._usage_counter = tally
        self._timing = pace
        self._json_strings = escapes
        self._include_usage = include_usage
        self.remaining_choices = choices
        self._suffix = form.text_suffix
        self._prefixes: list[bytes | None] = [None] * choices
        self._pending: dict[int, PendingText] = {}
        self._pending_bytes = 0

    def prompt(self, prompt_tokens: int) -> None:
        self._usage_counter.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        self._usage_counter.on_started(choice, started)

    def text(
        self, choice: int, delta: str, logprobs: CompletionTokenLogprobs | None = None
    ) -> bool:
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
        form = EventTemplate(prefix, self._json_strings, self._suffix)
        return StreamFastPath(choice, self._response, form, self._timing, text_table, token_log)

    def finish(self, choice: int, end: TextFinish) -> None:
        if self._prefixes[choice] is None:
            self._start_choice(choice)
        held = self._pending.pop(choice, None)
        if held is not None:
            self._pending_bytes -= held.size
            self._write_pending(choice, held)
        self._usage_counter.completion_tokens += end.completion_tokens
        self._response.write(self._encoder.encode_finish_chunk(choice, end))
        self.remaining_choices -= 1
        if self.remaining_choices == 0 and not self._response.overrun:
            usage = (
                self._encoder.encode_usage_chunk(self._usage_counter)
                if self._include_usage
                else b""
            )
            self._response.end(usage + DONE_EVENT)

    def check_complete(self) -> None:
        """The processor returned. Raises what ended the stream early."""
        if self._response.overrun:
            raise SlowReader(
                "the stream's backlog ran over: the client reads too slowly",
                hint="server.stream_backlog_bytes and server.stall_s are the limits",
            )
        if self.remaining_choices and self._response.open:
            raise InternalError("the answer ended early")

    def _start_choice(self, choice: int) -> bytes:
        if not self._response.started:
            self._exchange.start_stream(self._usage_counter.worker)
        opening = self._encoder.encode_first_chunk(choice)
        if opening:
            self._response.write(opening)
        prefix = self._prefixes[choice] = self._encoder.text_prefix(choice)
        return prefix

    def _buffer_text(
        self, choice: int, delta: str, logprobs: CompletionTokenLogprobs | None
    ) -> bool:
        response = self._response
        held = self._pending.get(choice)
        if held is None:
            held = self._pending[choice] = PendingText()
        held.texts.append(delta)
        size = len(delta)
        if logprobs is not None:
            held.logprobs += logprobs
            size += 64 * len(logprobs)
        held.size += size
        self._pending_bytes += size
        response.on_writable = self._flush_pending
        if self._pending_bytes + response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.open

    def _flush_pending(self) -> None:
        for choice, held in self._pending.items():
            self._write_pending(choice, held)
        self._pending.clear()
        self._pending_bytes = 0

    def _write_pending(self, choice: int, held: PendingText) -> None:
        text = "".join(held.texts)
        if held.logprobs:
            self._response.write(self._encoder.encode_text_chunk(choice, text, held.logprobs))
        else:
            self._response.write(
                self._encoder.text_prefix(choice) + self._json_strings[text] + self._suffix
            )


class UnaryReply(TextReply):
    """Gathers everything; the answer leaves with the last choice's end. `left`: choices that have
    not ended."""

    __slots__ = (
        "_encoder",
        "_ends",
        "_exchange",
        "_logprobs",
        "_response",
        "_texts",
        "_timing",
        "_usage_counter",
        "remaining_choices",
    )

    def __init__(
        self,
        exchange: Exchange,
        form: ResponseEncoder,
        tally: UsageCounter,
        pace: TokenTiming,
        *,
        choices: int,
    ) -> None:
        self._exchange = exchange
        self._response = exchange.response
        self._encoder = form
        self._usage_counter = tally
        self._timing = pace
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[DecodedTokenLogprob] | None] = [None] * choices
        self._ends: list[TextFinish | None] = [None] * choices
        self.remaining_choices = choices

    def prompt(self, prompt_tokens: int) -> None:
        self._usage_counter.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        self._usage_counter.on_started(choice, started)

    def text(
        self, choice: int, delta: str, logprobs: CompletionTokenLogprobs | None = None
    ) -> bool:
        self._timing.on_text(choice)
        self._texts[choice].append(delta)
        if logprobs is not None:
            gathered = self._logprobs[choice]
            if gathered is None:
                gathered = self._logprobs[choice] = []
            gathered += logprobs
        return self._response.open

    def finish(self, choice: int, end: TextFinish) -> None:
        self._usage_counter.completion_tokens += end.completion_tokens
        self._ends[choice] = end
        self.remaining_choices -= 1
        if self.remaining_choices:
            return
        texts = ["".join(parts) for parts in self._texts]
        ends = [one for one in self._ends if one is not None]
        worker = self._usage_counter.worker
        self._exchange.send_json(
            200,
            self._encoder.encode_response(texts, self._logprobs, ends, self._usage_counter),
            (("x-dynamo-worker", worker),) if worker else (),
        )

    def check_complete(self) -> None:
        """The processor returned. Raises if the answer is not complete."""
        if self.remaining_choices and self._response.open:
            raise InternalError("the answer ended early")


class OffsetReply(TextReply):
    """One prompt of several: its choices are counted on from `first`."""

    __slots__ = ("_offset", "_reply")

    def __init__(self, reply: TextReply, first: int) -> None:
        self._reply = reply
        self._offset = first

    def prompt(self, prompt_tokens: int) -> None:
        self._reply.prompt(prompt_tokens)

    def begin(self, choice: int, started: Started) -> None:
        self._reply.begin(self._offset + choice, started)

    def text(
        self, choice: int, delta: str, logprobs: CompletionTokenLogprobs | None = None
    ) -> bool:
        return self._reply.text(self._offset + choice, delta, logprobs)

    def finish(self, choice: int, end: TextFinish) -> None:
        self._reply.finish(self._offset + choice, end)

    def open_fast_path(
        self, choice: int, text_table: TextTable, token_log: array[int] | None
    ) -> FastPath | None:
        return self._reply.open_fast_path(self._offset + choice, text_table, token_log)
