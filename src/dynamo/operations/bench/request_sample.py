"""One request's answer, counted and stamped as its bytes arrive.

TTFT: request written -> first event with text. ITL: between the arrivals of two events with text of
one stream; events that come in one read have gaps of 0. TPOT: a request's mean gap. E2E: -> end.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

TEXT_FIELDS = (
    (b'"content":"', b'"content":""'),
    (b'"content": "', b'"content": ""'),
    (b'"text":"', b'"text":""'),
    (b'"text": "', b'"text": ""'),
    (b'"reasoning_content":"', b'"reasoning_content":""'),
)
"""How servers write an event with text, and one whose text is empty."""
CHAT_TEXT_FIELD = TEXT_FIELDS[0][0]
QUOTE = ord('"')
EVENT_END = b"\n\n"
CHUNK_END = b"\n\n\r\n"
MIN_EVENT_BYTES = 140
"""A second event does not fit into so much after the place of the first one's text, as an event has
at least so much before it."""
NO_POSITION = 1 << 40
CHUNK_FRAMING = (b"", b"\r\n", b"\r\n0\r\n\r\n")
"""What may stand after the last event of a read and is no beginning of another."""


class ServerUsage(msgspec.Struct, frozen=True):
    """Tokens as the server counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class RequestSample:
    """What one request came to. Times are monotonic seconds; None: did not happen. `gaps` is shared
    by all requests of a run; `keep`: the body's bytes are kept."""

    __slots__ = (
        "_incomplete",
        "_inter_token_s",
        "_text_position",
        "body",
        "ended_at",
        "error",
        "first_text_at",
        "keep_body",
        "last_text_at",
        "sent_at",
        "status",
        "text_events",
        "usage",
    )  # fmt: skip

    def __init__(self, gaps: array[float], *, keep_body: bool = False) -> None:
        self._inter_token_s = gaps
        self._incomplete = b""
        self._text_position = NO_POSITION
        self.keep_body = keep_body
        self.body: list[bytes] = []
        self.status = 0
        self.sent_at = self.ended_at = 0.0
        self.first_text_at: float | None = None
        self.last_text_at = 0.0
        self.text_events = 0
        self.usage: ServerUsage | None = None
        self.error = ""

    def feed(self, data: bytes, now: float) -> bool:
        """Part of an event stream, with or without chunk framing. True: one plain event with text
        and nothing else, as most reads are; those are told by where the text stood before."""
        at = self._text_position
        if (
            at < len(data) < at + MIN_EVENT_BYTES
            and data.startswith(CHAT_TEXT_FIELD, at)
            and data[at + len(CHAT_TEXT_FIELD)] != QUOTE
            and data.endswith(CHUNK_END)
            and self.first_text_at is not None
            and not self._incomplete
            and not self.keep_body
        ):
            self._inter_token_s.append(now - self.last_text_at)
            self.last_text_at = now
            self.text_events += 1
            return True
        self._parse_read(data, now)
        return False

    def _parse_read(self, data: bytes, now: float) -> None:
        if self.keep_body:
            self.body.append(data)
        if self._incomplete:
            data = self._incomplete + data
            self._incomplete = b""
        end = data.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            self._incomplete = data
            return
        if data[end:] not in CHUNK_FRAMING:
            self._incomplete = data[end:]
            data = data[:end]
        count = count_text_events(data)
        rest = data
        if count:
            self._record_events(count, now)
            self._text_position = (
                at if (at := data.find(CHAT_TEXT_FIELD)) >= MIN_EVENT_BYTES else NO_POSITION
            )
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
        at = max(data.rfind(b'"usage":{'), data.rfind(b'"usage": {'))
        for found in parse_events(data[data.rfind(b"data:", 0, at) :]):
            if found.get("usage"):
                self.usage = parse_usage(found["usage"])

    def finish(self, now: float, body: bytes = b"") -> None:
        """The answer is complete; `body`: of one that is no event stream."""
        self.ended_at = now
        if not self.status:
            self.error = self.error or "no HTTP answer"
        elif self.status != 200:
            code = parse_error_code(body)
            self.error = f"http {self.status}" + (f" {code}" if code else "")

    def response_text(self) -> str:
        """What the kept events say."""
        parts = []
        for event in parse_events(b"".join(self.body)):
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                parts.append(delta.get("content") or choice.get("text") or "")
        return "".join(parts)


def count_text_events(data: bytes) -> int:
    """Events with text in whole events."""
    for some, empty in TEXT_FIELDS:
        found = data.count(some)
        if found:
            found -= data.count(empty)
            if found:
                return found
    return 0


def parse_events(data: bytes) -> Sequence[Mapping[str, Any]]:
    """JSON of whole events; what is not JSON is left out."""
    found = []
    for part in data.split(EVENT_END):
        at = part.find(b"data:")
        if at >= 0:
            try:
                found.append(msgspec.json.decode(part[at + 5 :].strip()))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return [one for one in found if isinstance(one, dict)]


def parse_usage(found: Mapping[str, Any]) -> ServerUsage:
    """Of a response's `usage`."""
    details = found.get("prompt_tokens_details") or {}
    return ServerUsage(
        found.get("prompt_tokens") or 0,
        found.get("completion_tokens") or 0,
        details.get("cached_tokens") or 0,
    )


def parse_error_code(body: bytes) -> str:
    """The error's code, or the beginning of its text."""
    found = re.search(rb'"code": ?"([^"]+)"', body) or re.search(
        rb'"message": ?"([^"]{1,80})', body
    )
    return found[1].decode(errors="replace") if found else ""
