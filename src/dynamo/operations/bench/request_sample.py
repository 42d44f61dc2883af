"""Measurement of one request, taken while the bytes of its response arrive.

- TTFT: from sending the request, on a new connection if none is idle, to the first event with text.
- ITL: between two events with text of one stream; events in the same chunk are 0 apart.
- TPOT: the mean ITL of a request.
- E2E: from sending the request to the end of the response.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import msgspec

TEXT_FIELDS = (
    (b'"content":"', b'"content":""'),
    (b'"content": "', b'"content": ""'),
    (b'"text":"', b'"text":""'),
    (b'"text": "', b'"text": ""'),
    (b'"reasoning_content":"', b'"reasoning_content":""'),
)
"""Bytes that mark an event with text, and those of the same field with empty text."""
CHAT_TEXT_FIELD = TEXT_FIELDS[0][0]
QUOTE = ord('"')
EVENT_END = b"\n\n"
MIN_EVENT_BYTES = 140
"""Least bytes of an event before its text. A part of a body with fewer bytes after the first text
field holds no second event."""
NO_POSITION = 1 << 40


class ServerUsage(msgspec.Struct, frozen=True):
    """Token counts reported by the server."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class RequestSample:
    """Measurement of one request. Times are monotonic seconds, None for events that did not happen.
    All requests of a run append to the same `gaps`. `keep_body` stores the response's bytes."""

    __slots__ = (
        "_incomplete", "_inter_token_s", "_text_position", "body", "ended_at", "error",
        "first_text_at", "keep_body", "last_text_at", "sent_at", "text_events", "usage",
    )  # fmt: skip

    def __init__(self, gaps: array[float], *, keep_body: bool = False) -> None:
        self._inter_token_s = gaps
        self._incomplete = b""
        self._text_position = NO_POSITION
        self.keep_body = keep_body
        self.body: list[bytes] = []
        self.sent_at = self.ended_at = 0.0
        self.first_text_at: float | None = None
        self.last_text_at = 0.0
        self.text_events = 0
        self.usage: ServerUsage | None = None
        self.error = ""

    def feed(self, data: bytes) -> bool:
        """Count the events in a part of an event stream (an `OnData`). A fast path recognises one
        event by the position of the text in the part before."""
        now, position = monotonic(), self._text_position
        if (
            position < len(data) < position + MIN_EVENT_BYTES
            and data.startswith(CHAT_TEXT_FIELD, position)
            and data[position + len(CHAT_TEXT_FIELD)] != QUOTE
            and data.endswith(EVENT_END)
            and self.first_text_at is not None
            and not self._incomplete
            and not self.keep_body
        ):
            self._inter_token_s.append(now - self.last_text_at)
            self.last_text_at = now
            self.text_events += 1
            return True
        if self.keep_body:
            self.body.append(data)
        data, end, self._incomplete = (self._incomplete + data).rpartition(EVENT_END)
        if end:
            self._count_events(data + end, now)
        return True

    def _count_events(self, data: bytes, now: float) -> None:
        count = count_text_events(data)
        rest = data
        if count:
            self._record_events(count, now)
            position = data.find(CHAT_TEXT_FIELD)
            self._text_position = position if position >= MIN_EVENT_BYTES else NO_POSITION
            rest = data[max(0, data.rfind(CHAT_TEXT_FIELD)) :]
        if b'"usage":{' in rest or b'"usage": {' in rest:
            self._read_usage(data)
        if b'data: {"error"' in rest or b"event: error" in rest:
            self.error = parse_error_code(rest) or "error in the stream"

    def _record_events(self, count: int, now: float) -> None:
        if self.first_text_at is None:
            self.first_text_at = now
        else:
            self._inter_token_s.append(now - self.last_text_at)
        if count > 1:
            self._inter_token_s.extend([0.0] * (count - 1))
        self.last_text_at = now
        self.text_events += count

    def _read_usage(self, data: bytes) -> None:
        position = max(data.rfind(b'"usage":{'), data.rfind(b'"usage": {'))
        for event in parse_events(data[data.rfind(b"data:", 0, position) :]):
            if event.get("usage"):
                self.usage = parse_usage(event["usage"])

    def finish(self, status: int, body: bytes) -> None:
        """Record the end of the response. `body` is empty for an event stream."""
        if status != 200:
            code = parse_error_code(body)
            self.error = f"http {status}" + (f" {code}" if code else "")

    def response_text(self) -> str:
        """Return the text of the stored response."""
        parts = []
        for event in parse_events(b"".join(self.body)):
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                parts.append(delta.get("content") or choice.get("text") or "")
        return "".join(parts)


def count_text_events(data: bytes) -> int:
    """Return the number of events with text in complete events."""
    for field, empty_field in TEXT_FIELDS:
        count = data.count(field)
        if count:
            count -= data.count(empty_field)
            if count:
                return count
    return 0


def parse_events(data: bytes) -> Sequence[Mapping[str, Any]]:
    """Return the JSON objects of complete events; other events are skipped."""
    events = []
    for part in data.split(EVENT_END):
        start = part.find(b"data:")
        if start >= 0:
            try:
                events.append(msgspec.json.decode(part[start + 5 :].strip()))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return [event for event in events if isinstance(event, dict)]


def parse_usage(usage: Mapping[str, Any]) -> ServerUsage:
    """Return the counts of a response's `usage` object."""
    details = usage.get("prompt_tokens_details") or {}
    return ServerUsage(
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or 0,
        details.get("cached_tokens") or 0,
    )


def parse_error_code(body: bytes) -> str:
    """Return the code of an error body, else the start of its message, else an empty string."""
    match = re.search(rb'"code": ?"([^"]+)"', body) or re.search(
        rb'"message": ?"([^"]{1,80})', body
    )
    return match[1].decode(errors="replace") if match else ""
