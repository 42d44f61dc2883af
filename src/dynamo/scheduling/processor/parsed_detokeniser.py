"""ParsedDetokeniser: the detokeniser of an answer in which reasoning and tool calls are read."""

from __future__ import annotations

from dynamo.core.text import TextFinish, TextOptions, TextReply
from dynamo.core.values import Finish, TokenLogprobs
from dynamo.models.answers.reader import AnswerReader, Events
from dynamo.scheduling.processor.answer_parsing import AnswerParsing
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary


class ParsedDetokeniser(Detokeniser):
    """Passes tokens through an `AnswerReader`. Stop strings and logprobs apply to text only.

    While the reader is idle, tokens in which no marker begins take the way of plain answers.
    """

    __slots__ = ("_marker_chars", "_reader", "_reasoning_tokens")

    def __init__(
        self,
        choice: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        stops: StopStrings | None,
        reply: TextReply,
        prompt_end: bytes,
        reader: AnswerReader,
        answers: AnswerParsing,
    ) -> None:
        super().__init__(choice, vocabulary, options, stops, reply, prompt_end=prompt_end)
        self._reader = reader
        self._marker_chars = answers.chars
        self._reasoning_tokens = 0
        self._skipped_ids = vocabulary.special_ids
        self._token_texts = answers.token_texts
        self._texts = self._token_texts.texts
        self._nothing_pending = False

    def finish(self, end: Finish) -> None:
        if end.stop_token is not None:
            self._token_count += 1
        tail = self._decoder.end() if self._decoder is not None else ""
        if tail and not self._pass_events(self._reader.feed(tail)):
            return
        if self._reader.in_reasoning:
            self._logprobs.clear()
        if self._pass_events(self._reader.end(cut=end.reason != "stop")) and self._flush_end():
            self._finish(end, end.stop_token if end.stop_token in self._stop_ids else None)

    def _decode_token(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        decoder = self._decoder
        if decoder is None:
            decoder = self._open_decoder()
        char = self._marker_chars.get(token)
        if char is not None:
            text = decoder.flush() + char
        elif token in self._skipped_ids:
            return True
        else:
            if logprobs is not None:
                self._logprobs.append(self._convert_logprobs(logprobs))
            text = decoder.step(token)
        self._text_offset += len(text)
        reader = self._reader
        reasoned = reader.in_reasoning
        wants_more = self._pass_events(reader.feed(text)) if text else True
        self._reasoning_tokens += reasoned or reader.in_reasoning
        self._nothing_pending = reader.idle and not (
            self._pending_text or self._remainder or self._logprobs or decoder.has_pending
        )
        if self._fast_path is not None:
            self._fast_path.buffer_empty = self._nothing_pending
        return wants_more

    def _pass_events(self, events: Events) -> bool:
        for event in events:
            if isinstance(event, str):
                wants_more = self._emit(event)
            else:
                self._logprobs.clear()
                wants_more = self._flush_text() and self._reply.event(self._choice, event)
            if not wants_more:
                return False
        if self._reader.finished:
            self._finish(Finish("stop"), None)
        return not self._reader.finished

    def _flush_text(self) -> bool:
        """Send the text that might have begun a stop string: something else follows it."""
        if self._stop_scanner is not None:
            self._stop_scanner.pending_text = ""
        return self._flush() if self._pending_text or self._remainder else True

    def _finish(self, end: Finish, stop: str | int | None) -> None:
        reason = "tool_calls" if self._reader.calls and end.reason == "stop" else end.reason
        cached_tokens = (end.cached_tokens or 0) if self._choice == 0 else 0
        reply_end = TextFinish(
            reason,
            self._count_tokens(),
            stop,
            self._reasoning_tokens,
            cached_tokens=cached_tokens,
        )
        self._reply.finish(self._choice, reply_end)
