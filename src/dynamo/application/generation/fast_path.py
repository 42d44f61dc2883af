"""The token fast path of event streams (see `core/fast_path.py`)."""

from __future__ import annotations

from array import array

import msgspec

from dynamo.application.frontend_metrics import MAX_PENDING_TIMESTAMPS, TokenTiming
from dynamo.communication.http import Response
from dynamo.core.fast_path import FastPath, TextTable


class JsonStringCache(dict[str, bytes]):
    """Caches the JSON string of each text, because tokens repeat. A lookup is one C call."""

    def __init__(self, capacity: int = 1 << 16, max_text_length: int = 64) -> None:
        super().__init__()
        self._capacity = capacity
        self._max_text_length = max_text_length

    def __missing__(self, text: str) -> bytes:
        json_text = msgspec.json.encode(text)
        if len(text) <= self._max_text_length:
            if len(self) >= self._capacity:
                self.clear()
            self[text] = json_text
        return json_text


JSON_STRINGS = JsonStringCache()
"""The JSON strings of the texts of all answers."""


class StreamFastPath(FastPath):
    """Writes single tokens of one choice as events. A text stands between the two parts of `frame`.

    A token touches as few objects as possible. Between two tokens of a stream the CPU caches lose
    them, so every touched object is fetched from memory again.
    """

    __slots__ = (
        "_append_token",
        "_find_unsafe",
        "_json_by_token",
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
        frame: tuple[bytes, ...],
        timing: TokenTiming,
        text_table: TextTable,
        token_log: array[int],
    ) -> None:
        super().__init__()
        self._response = response
        self._pending_events, self._schedule_flush = response.get_event_buffer()
        self._prefix, self._suffix = frame
        token_texts, self._find_unsafe = text_table.token_texts, text_table.may_begin_stop
        self._texts, self._json_by_token = token_texts.texts, token_texts.json_texts
        self._timing = timing
        self._now, self._timestamps = timing.now, timing.timestamps[choice]
        self._append_token = token_log.append

    def send_token(self, token: int) -> bool | None:
        response = self._response
        if not self.buffer_empty or response.congested or not response.open:
            return None
        try:
            json_text = self._json_by_token[token]
        except IndexError:
            return None
        if json_text is None or self._find_unsafe is not None:
            json_text = self._encode_token(token)
            if json_text is None:
                return None
        self.tokens_sent += 1
        append_token, now = self._append_token, self._now  # calling a slot directly is slower
        timestamps, events = self._timestamps, self._pending_events
        append_token(token)
        timestamps.append(now())
        if len(timestamps) == MAX_PENDING_TIMESTAMPS:
            self._timing.flush()
        if not events:
            self._schedule_flush()
        events.append(self._prefix + json_text + self._suffix)
        return True

    def _encode_token(self, token: int) -> bytes | None:
        text = self._texts[token]
        if text is None or (self._find_unsafe is not None and self._find_unsafe(text) is not None):
            return None
        json_text = self._json_by_token[token] = JSON_STRINGS[text]
        return json_text
