"""Server-sent events: the pieces that every stream is made of."""

from __future__ import annotations

import msgspec

MAX_TOKEN_TABLES = 16
DONE_EVENT = b"data: [DONE]\n\n"
SSE_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


class JsonStringCache(dict[str, bytes]):
    """delta -> JSON string, remembered: tokens repeat. `escapes[delta]` is one C look-up."""

    def __init__(self, capacity: int = 1 << 16, max_text_length: int = 64) -> None:
        super().__init__()
        self._capacity = capacity
        self._token_tables: dict[int, tuple[list[str | None], list[bytes | None]]] = {}
        self._max_text_length = max_text_length

    def __missing__(self, delta: str) -> bytes:
        escaped = msgspec.json.encode(delta)
        if len(delta) <= self._max_text_length:
            if len(self) >= self._capacity:
                self.clear()
            self[delta] = escaped
        return escaped

    def token_table(self, texts: list[str | None]) -> list[bytes | None]:
        """As long as `texts`: the JSON strings of those that were said, for a look-up by token. One
        for each such list, of a few."""
        known = self._token_tables.get(id(texts))
        if known is None:
            if len(self._token_tables) >= MAX_TOKEN_TABLES:
                self._token_tables.clear()
            known = self._token_tables[id(texts)] = texts, [None] * len(texts)
        return known[1]


def error_event(error: bytes) -> bytes:
    """An error in the middle of a stream, and its end."""
    return b"data: %b\n\n%b" % (error, DONE_EVENT)
