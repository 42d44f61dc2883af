"""Detokeniser: the reply of one choice, from token ids to text. The frontend's hot path."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from dynamo.core.fast_path import FastPath, SendToken, TextTable
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import DecodedTokenLogprob, TextFinish, TextOptions, TextReply
from dynamo.core.values import Finish, Started, TokenLogprobs
from dynamo.scheduling.processor.stop_strings import StopStrings, StopStringScanner
from dynamo.scheduling.processor.vocabulary import TextDecoder, Vocabulary


class Detokeniser(Reply):
    """Turns the tokens of one choice into text. Every token remains a separate delta.

    Text and its logprobs are held back only while a character is incomplete or a stop string may
    have begun. A character that the end cuts is left out. A stop string finishes the choice; the
    returned False then cancels the generation. `prompt_end`: the last packed ids of the prompt,
    behind which the text is decoded.
    """

    __slots__ = (
        "_choice",
        "_decoder",
        "_echo",
        "_fast_path",
        "_include_stop",
        "_logprobs",
        "_may_begin_stop",
        "_min_tokens",
        "_nothing_pending",
        "_pending_text",
        "_prompt_end",
        "_remainder",
        "_reply",
        "_skipped_ids",
        "_stop_ids",
        "_stop_scanner",
        "_text_offset",
        "_texts",
        "_token_count",
        "_token_texts",
        "_vocabulary",
    )

    def __init__(
        self,
        choice: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        stops: StopStrings | None,
        reply: TextReply,
        echo: str = "",
        prompt_end: bytes = b"",
    ) -> None:
        self._choice = choice
        self._reply = reply
        self._vocabulary = vocabulary
        skip = options.skip_special_tokens
        self._token_texts = vocabulary.token_texts if skip else vocabulary.token_texts_with_special
        self._texts = self._token_texts.texts
        self._skipped_ids = vocabulary.special_ids if skip else frozenset[int]()
        self._decoder: TextDecoder | None = None  # created on first use: most answers need none
        self._stop_scanner = None if stops is None else StopStringScanner(stops)
        self._may_begin_stop: Callable[[str], object] | None = (
            None if stops is None else stops.search_beginning
        )
        self._include_stop = options.include_stop
        self._stop_ids = options.stop_token_ids
        self._min_tokens = options.min_tokens
        self._prompt_end = prompt_end
        self._echo = echo
        self._token_count = 0
        self._text_offset = len(echo)  # and the characters decoded by `_decode_token`
        self._fast_path: FastPath | None = None
        self._nothing_pending = True
        self._pending_text: list[tuple[str, list[DecodedTokenLogprob] | None]] = []
        self._remainder = ""
        self._logprobs: list[DecodedTokenLogprob] = []

    def begin(self, started: Started) -> None:
        self._reply.begin(self._choice, started)
        if self._echo:
            self._reply.text(self._choice, self._echo)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if self._nothing_pending and logprobs is None and len(ids) == 1:
            try:
                text = self._texts[ids[0]]
            except IndexError:
                text = None
            may_begin = self._may_begin_stop
            if text is not None and (may_begin is None or may_begin(text) is None):
                self._token_count += 1
                return self._reply.text(self._choice, text)
        if logprobs is None:
            return all(self._process_token(token) for token in ids)
        return all(map(self._process_token, ids, logprobs))

    def open_fast_path(self, token_log: array[int] | None = None) -> SendToken | None:
        self._token_count = self._count_tokens()
        self._fast_path = fast_path = self._reply.open_fast_path(
            self._choice, TextTable(self._token_texts, self._may_begin_stop), token_log
        )
        if fast_path is None:
            return None
        fast_path.buffer_empty = self._nothing_pending
        return fast_path.send_token

    def finish(self, end: Finish) -> None:
        stop = end.stop_token
        if stop is not None:
            self._token_count += 1  # as in vLLM, the usage counts the token that ends an answer
        if self._include_stop and stop is not None and not self._decode_token(stop):
            return
        if self._nothing_pending or self._flush_end():
            self._finish(end, stop if stop in self._stop_ids else None)

    def _process_token(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        self._token_count += 1
        return self._decode_token(token, logprobs)

    def _decode_token(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        if token in self._skipped_ids:
            return True
        if logprobs is not None:
            self._logprobs.append(self._convert_logprobs(logprobs))
        decoder = self._decoder
        if decoder is None:
            decoder = self._open_decoder()
        text = decoder.step(token)
        self._text_offset += len(text)
        wants_more = self._emit(text) if text else True
        self._nothing_pending = not (
            self._pending_text or self._remainder or self._logprobs or decoder.has_pending
        )
        if self._fast_path is not None:
            self._fast_path.buffer_empty = self._nothing_pending
        return wants_more

    def _open_decoder(self) -> TextDecoder:
        """Create the decoder before its first token, which is counted."""
        self._decoder = decoder = self._vocabulary.create_decoder(
            skip_special=bool(self._skipped_ids),
            prompt_end=self._prompt_end,
            at_start=self._count_tokens() == 1,
        )
        return decoder

    def _count_tokens(self) -> int:
        sent = 0 if self._fast_path is None else self._fast_path.tokens_sent
        return self._token_count + sent

    def _emit(self, text: str) -> bool:
        """Send the text that cannot begin a stop string. Return False when the choice has ended."""
        logprobs, self._logprobs = self._logprobs or None, []
        if self._stop_scanner is None:
            return self._reply.text(self._choice, text, logprobs)
        self._pending_text.append((self._remainder + text, logprobs))
        self._remainder = ""
        may_match = self._count_tokens() > self._min_tokens
        free, stop = self._stop_scanner.feed(text, may_match=may_match)
        if not self._emit_pending(free):
            return False
        if stop is None:
            return True
        self._finish(Finish("stop"), stop)
        return False

    def _emit_pending(self, free: int) -> bool:
        """Send `free` characters, one delta for each token. The rest of a cut token is sent with
        the next one."""
        while free and self._pending_text:
            text, logprobs = self._pending_text.pop(0)
            self._hold_back(text[free:])
            if not self._reply.text(self._choice, text[:free], logprobs):
                return False
            free -= min(free, len(text))
        return True

    def _hold_back(self, rest: str) -> None:
        if rest and self._pending_text:
            text, logprobs = self._pending_text[0]
            self._pending_text[0] = (rest + text, logprobs)
        else:
            self._remainder = rest

    def _flush_end(self) -> bool:
        """Send what is held at the end, and the logprobs of text that is left out."""
        tail = self._decoder.end() if self._decoder is not None else ""
        if (tail and not self._emit(tail)) or not self._flush():
            return False
        logprobs, self._logprobs = self._logprobs, []
        return self._reply.text(self._choice, "", logprobs) if logprobs else True

    def _flush(self) -> bool:
        tail = self._decoder.flush() if self._decoder is not None else ""
        if tail and not self._emit(tail):
            return False
        if not self._emit_pending(sum([len(text) for text, _ in self._pending_text])):
            return False
        rest, self._remainder = self._remainder, ""
        return self._reply.text(self._choice, rest) if rest else True

    def _finish(self, end: Finish, stop: str | int | None) -> None:
        text_end = TextFinish(end.reason, self._count_tokens(), stop)
        if end.cached_tokens and self._choice == 0:
            text_end = replace(text_end, cached_tokens=end.cached_tokens)
        self._reply.finish(self._choice, text_end)

    def _convert_logprobs(self, logprobs: TokenLogprobs) -> DecodedTokenLogprob:
        read = self._vocabulary.get_token_bytes
        raw = read(logprobs.token)
        top = [(read(token), logprob) for token, logprob in logprobs.top]
        return DecodedTokenLogprob(
            _decode_lossy(raw),
            raw,
            logprobs.logprob,
            tuple((_decode_lossy(other), other, logprob) for other, logprob in top),
            self._text_offset,
        )


def _decode_lossy(raw: bytes) -> str:
    return raw.decode(errors="replace")
