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

TEXT = (
    (b'"content":"', b'"content":""'),
    (b'"content": "', b'"content": ""'),
    (b'"text":"', b'"text":""'),
    (b'"text": "', b'"text": ""'),
    (b'"reasoning_content":"', b'"reasoning_content":""'),
)
"""How servers write an event with text, and one whose text is empty."""
CHAT = TEXT[0][0]
QUOTE = ord('"')
EVENT_END = b"\n\n"
CHUNK_END = b"\n\n\r\n"
PLAIN = 140
"""A second event does not fit into so much after the place of the first one's text, as an event has
at least so much before it."""
NOWHERE = 1 << 40
FRAMING = (b"", b"\r\n", b"\r\n0\r\n\r\n")
"""What may stand after the last event of a read and is no beginning of another."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Sample:
    """What one request came to. Times are monotonic seconds; None: did not happen. `gaps` is shared
    by all requests of a run; `keep`: the body's bytes are kept."""

    __slots__ = (
        "_at", "_carry", "_gaps", "began", "body", "ended", "error", "events", "first", "keep",
        "last", "status", "usage",
    )  # fmt: skip

    def __init__(self, gaps: array[float], *, keep: bool = False) -> None:
        self._gaps = gaps
        self._carry = b""
        self._at = NOWHERE
        self.keep = keep
        self.body: list[bytes] = []
        self.status = 0
        self.began = self.ended = 0.0
        self.first: float | None = None
        self.last = 0.0
        self.events = 0
        self.usage: Usage | None = None
        self.error = ""

    def feed(self, data: bytes, now: float) -> bool:
        """Part of an event stream, with or without chunk framing. True: one plain event with text
        and nothing else, as most reads are; those are told by where the text stood before."""
        at = self._at
        if (
            at < len(data) < at + PLAIN
            and data.startswith(CHAT, at)
            and data[at + len(CHAT)] != QUOTE
            and data.endswith(CHUNK_END)
            and self.first is not None
            and not self._carry
            and not self.keep
        ):
            self._gaps.append(now - self.last)
            self.last = now
            self.events += 1
            return True
        self._feed(data, now)
        return False

    def _feed(self, data: bytes, now: float) -> None:
        if self.keep:
            self.body.append(data)
        if self._carry:
            data = self._carry + data
            self._carry = b""
        end = data.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            self._carry = data
            return
        if data[end:] not in FRAMING:
            self._carry = data[end:]
            data = data[:end]
        count = count_texts(data)
        rest = data
        if count:
            self._stamp(count, now)
            self._at = at if (at := data.find(CHAT)) >= PLAIN else NOWHERE
            rest = data[max(0, data.rfind(CHAT)) :]
        if b'"usage":{' in rest or b'"usage": {' in rest:
            self._read_usage(data)
        if b'data: {"error"' in rest or b"event: error" in rest:
            self.error = code_of(rest) or "error in the stream"

    def _stamp(self, count: int, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self._gaps.append(now - self.last)
        if count > 1:
            self._gaps.extend([0.0] * (count - 1))
        self.last = now
        self.events += count

    def _read_usage(self, data: bytes) -> None:
        at = max(data.rfind(b'"usage":{'), data.rfind(b'"usage": {'))
        for found in events_of(data[data.rfind(b"data:", 0, at) :]):
            if found.get("usage"):
                self.usage = usage_of(found["usage"])

    def finish(self, now: float, body: bytes = b"") -> None:
        """The answer is complete; `body`: of one that is no event stream."""
        self.ended = now
        if not self.status:
            self.error = self.error or "no HTTP answer"
        elif self.status != 200:
            code = code_of(body)
            self.error = f"http {self.status}" + (f" {code}" if code else "")

    def text(self) -> str:
        """What the kept events say."""
        parts = []
        for event in events_of(b"".join(self.body)):
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                parts.append(delta.get("content") or choice.get("text") or "")
        return "".join(parts)


def count_texts(data: bytes) -> int:
    """Events with text in whole events."""
    for some, empty in TEXT:
        found = data.count(some)
        if found:
            found -= data.count(empty)
            if found:
                return found
    return 0


def events_of(data: bytes) -> Sequence[Mapping[str, Any]]:
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


def usage_of(found: Mapping[str, Any]) -> Usage:
    """Of a response's `usage`."""
    details = found.get("prompt_tokens_details") or {}
    return Usage(
        found.get("prompt_tokens") or 0,
        found.get("completion_tokens") or 0,
        details.get("cached_tokens") or 0,
    )


def code_of(body: bytes) -> str:
    """The error's code, or the beginning of its text."""
    found = re.search(rb'"code": ?"([^"]+)"', body) or re.search(
        rb'"message": ?"([^"]{1,80})', body
    )
    return found[1].decode(errors="replace") if found else ""
