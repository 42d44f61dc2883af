"""Where the processor's text goes: a stream of events, or one JSON answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dynamo.application.exchange import Exchange
from dynamo.application.format import Format
from dynamo.application.lane import Form, StreamLane
from dynamo.application.pace import Pace
from dynamo.application.sse import DONE, Escapes
from dynamo.application.usage import Tally
from dynamo.core.errors import InternalError, SlowReader
from dynamo.core.text import Lane, TextFinish, TextReply, TokenText, Words
from dynamo.core.values import Started

Logprobs = Sequence[TokenText]


class Held:
    """Text of one choice that a congested connection could not take."""

    __slots__ = ("logprobs", "size", "texts")

    def __init__(self) -> None:
        self.size = 0
        self.texts: list[str] = []
        self.logprobs: list[TokenText] = []


class StreamReply(TextReply):
    """Every text is an event of its own; only while the client does not read, texts are merged.

    The head leaves with the first text, so that whatever fails before has its own status.
    `left`: choices that have not ended.
    """

    __slots__ = (
        "_escapes",
        "_exchange",
        "_form",
        "_held",
        "_held_bytes",
        "_pace",
        "_prefixes",
        "_response",
        "_suffix",
        "_tally",
        "_usage",
        "left",
    )

    def __init__(
        self,
        exchange: Exchange,
        form: Format,
        tally: Tally,
        pace: Pace,
        escapes: Escapes,
        *,
        choices: int,
        usage: bool,
    ) -> None:
        self._exchange = exchange
        self._response = exchange.response
        self._form = form
        self._tally = tally
        self._pace = pace
        self._escapes = escapes
        self._usage = usage
        self.left = choices
        self._suffix = form.suffix
        self._prefixes: list[bytes | None] = [None] * choices
        self._held: dict[int, Held] = {}
        self._held_bytes = 0

    def prompt(self, prompt_tokens: int) -> None:
        self._tally.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        self._tally.begin(choice, started)

    def text(self, choice: int, delta: str, logprobs: Logprobs | None = None) -> bool:
        self._pace.mark(choice)
        prefix = self._prefixes[choice] or self._open(choice)
        response = self._response
        if response.congested:
            return self._hold(choice, delta, logprobs)
        if logprobs is None:
            return response.write(prefix + self._escapes[delta] + self._suffix)
        return response.write(self._form.event(choice, delta, logprobs))

    def lane(self, choice: int, words: Words, kept: array[int] | None) -> Lane | None:
        prefix = self._prefixes[choice]
        if prefix is None:
            return None
        kept = array("I") if kept is None else kept
        form = Form(prefix, self._escapes, self._suffix)
        return StreamLane(choice, self._response, form, self._pace, words, kept)

    def finish(self, choice: int, end: TextFinish) -> None:
        if self._prefixes[choice] is None:
            self._open(choice)
        held = self._held.pop(choice, None)
        if held is not None:
            self._held_bytes -= held.size
            self._write_held(choice, held)
        self._tally.completion_tokens += end.completion_tokens
        self._response.write(self._form.finish(choice, end))
        self.left -= 1
        if self.left == 0 and not self._response.overrun:
            usage = self._form.usage(self._tally) if self._usage else b""
            self._response.end(usage + DONE)

    def close(self) -> None:
        """The processor returned. Raises what ended the stream early."""
        if self._response.overrun:
            raise SlowReader(
                "the stream's backlog ran over: the client reads too slowly",
                hint="server.stream_backlog_bytes and server.stall_s are the limits",
            )
        if self.left and self._response.open:
            raise InternalError("the answer ended early")

    def _open(self, choice: int) -> bytes:
        if not self._response.started:
            self._exchange.start_stream(self._tally.worker)
        opening = self._form.opening(choice)
        if opening:
            self._response.write(opening)
        prefix = self._prefixes[choice] = self._form.prefix(choice)
        return prefix

    def _hold(self, choice: int, delta: str, logprobs: Logprobs | None) -> bool:
        response = self._response
        held = self._held.get(choice)
        if held is None:
            held = self._held[choice] = Held()
        held.texts.append(delta)
        size = len(delta)
        if logprobs is not None:
            held.logprobs += logprobs
            size += 64 * len(logprobs)
        held.size += size
        self._held_bytes += size
        response.on_relief = self._release
        if self._held_bytes + response.backlog_bytes > response.backlog_limit:
            response.overrun, response.open = True, False
        return response.open

    def _release(self) -> None:
        for choice, held in self._held.items():
            self._write_held(choice, held)
        self._held.clear()
        self._held_bytes = 0

    def _write_held(self, choice: int, held: Held) -> None:
        text = "".join(held.texts)
        if held.logprobs:
            self._response.write(self._form.event(choice, text, held.logprobs))
        else:
            self._response.write(self._form.prefix(choice) + self._escapes[text] + self._suffix)


class AnswerReply(TextReply):
    """Gathers everything; the answer leaves with the last choice's end. `left`: choices that have
    not ended."""

    __slots__ = (
        "_ends",
        "_exchange",
        "_form",
        "_logprobs",
        "_pace",
        "_response",
        "_tally",
        "_texts",
        "left",
    )

    def __init__(
        self, exchange: Exchange, form: Format, tally: Tally, pace: Pace, *, choices: int
    ) -> None:
        self._exchange = exchange
        self._response = exchange.response
        self._form = form
        self._tally = tally
        self._pace = pace
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenText] | None] = [None] * choices
        self._ends: list[TextFinish | None] = [None] * choices
        self.left = choices

    def prompt(self, prompt_tokens: int) -> None:
        self._tally.prompt_tokens += prompt_tokens

    def begin(self, choice: int, started: Started) -> None:
        self._tally.begin(choice, started)

    def text(self, choice: int, delta: str, logprobs: Logprobs | None = None) -> bool:
        self._pace.mark(choice)
        self._texts[choice].append(delta)
        if logprobs is not None:
            gathered = self._logprobs[choice]
            if gathered is None:
                gathered = self._logprobs[choice] = []
            gathered += logprobs
        return self._response.open

    def finish(self, choice: int, end: TextFinish) -> None:
        self._tally.completion_tokens += end.completion_tokens
        self._ends[choice] = end
        self.left -= 1
        if self.left:
            return
        texts = ["".join(parts) for parts in self._texts]
        ends = [one for one in self._ends if one is not None]
        worker = self._tally.worker
        self._exchange.send_json(
            200,
            self._form.whole(texts, self._logprobs, ends, self._tally),
            (("x-dynamo-worker", worker),) if worker else (),
        )

    def close(self) -> None:
        """The processor returned. Raises if the answer is not complete."""
        if self.left and self._response.open:
            raise InternalError("the answer ended early")


class OffsetReply(TextReply):
    """One prompt of several: its choices are counted on from `first`."""

    __slots__ = ("_first", "_reply")

    def __init__(self, reply: TextReply, first: int) -> None:
        self._reply = reply
        self._first = first

    def prompt(self, prompt_tokens: int) -> None:
        self._reply.prompt(prompt_tokens)

    def begin(self, choice: int, started: Started) -> None:
        self._reply.begin(self._first + choice, started)

    def text(self, choice: int, delta: str, logprobs: Logprobs | None = None) -> bool:
        return self._reply.text(self._first + choice, delta, logprobs)

    def finish(self, choice: int, end: TextFinish) -> None:
        self._reply.finish(self._first + choice, end)

    def lane(self, choice: int, words: Words, kept: array[int] | None) -> Lane | None:
        return self._reply.lane(self._first + choice, words, kept)
