"""The shortest way of a token: from its id to the connection."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from dynamo.application.generation.token_timing import MAX_PENDING_TIMESTAMPS, TokenTiming
from dynamo.application.openai.response_encoder import JsonStringCache
from dynamo.communication.http import Response
from dynamo.core.fast_path import FastPath, TextTable


class EventTemplate(NamedTuple):
    """An event: what stands before a text's JSON string, where that is found, what follows it."""

    prefix: bytes
    json_strings: JsonStringCache
    suffix: bytes


class StreamFastPath(FastPath):
    """One choice of a stream of events. It touches as few objects as can be: from one token of a
    paced stream to the next the processor's caches forget, and what is touched is fetched anew."""

    __slots__ = (
        "_append_token",
        "_find_unsafe",
        "_json_by_token",
        "_json_strings",
        "_now",
        "_pending_events",
        "_prefix",
        "_response",
        "_schedule_flush",
        "_suffix",
        "_texts",
        "_timestamps",
        "_timing",
    )

    def __init__(
        self,
        choice: int,
        response: Response,
        form: EventTemplate,
        pace: TokenTiming,
        words: TextTable,
        kept: array[int],
    ) -> None:
        super().__init__()
        self._response = response
        self._pending_events, self._schedule_flush = response.get_event_buffer()
        self._prefix, self._json_strings, self._suffix = form
        self._texts, self._find_unsafe = words.texts, words.may_begin_stop
        self._json_by_token = form.json_strings.token_table(words.texts)
        self._timing = pace
        self._now, self._timestamps = pace.now, pace.timestamps[choice]
        self._append_token = kept.append

    def send_token(self, token: int) -> bool | None:
        response = self._response
        if not self.buffer_empty or response.congested or not response.open:
            return None
        try:
            piece = self._json_by_token[token]
        except IndexError:
            return None
        if piece is None or self._find_unsafe is not None:
            piece = self._encode_token(token)
            if piece is None:
                return None
        self.tokens_sent += 1
        keep, now, times, events = (
            self._append_token,
            self._now,
            self._timestamps,
            self._pending_events,
        )
        keep(token)  # calling a slot directly is slower in CPython 3.11
        times.append(now())
        if len(times) == MAX_PENDING_TIMESTAMPS:
            self._timing.flush()
        if not events:
            self._schedule_flush()
        events.append(self._prefix + piece + self._suffix)
        return True

    def _encode_token(self, token: int) -> bytes | None:
        text = self._texts[token]
        if text is None or (self._find_unsafe is not None and self._find_unsafe(text) is not None):
            return None
        piece = self._json_by_token[token] = self._json_strings[text]
        return piece
