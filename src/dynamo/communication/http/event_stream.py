"""Server-sent events, as foreign servers write them."""

from __future__ import annotations

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS, MalformedAnswer

MAX_EVENT_BYTES = 1 << 20
MAX_DATA_LINES = 1000
EVENT_TIMEOUT_S = 15.0
"""An event that has begun must be complete after this time."""
DONE = b"[DONE]"
"""The data of the last event of an answer in the OpenAI API."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPLETE_JSON = msgspec.json.Decoder(msgspec.Raw).decode


ServerEvent = tuple[bytes, bytes]
"""The field `event` of an event, b"" without one, and its data."""


class EventStream:
    """Splits a body into events. Lines end by LF, CR or both. An event ends by an empty line, or
    where a line of data follows a complete JSON value. A body that is one JSON value without fields
    is the data of one event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._rest_began_s = 0.0
        self._after_cr = False
        self._kind = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._lines = 0
        self._is_json = False
        self.unread = b""
        """The beginning of the first line that is no part of an event."""

    def feed(self, part: bytes) -> list[ServerEvent]:
        """Return the events that `part` completes. Raises `MalformedAnswer` for an endless or slow
        event."""
        # The short way: a part that is one line of JSON and the empty line after it.
        if (
            part.startswith(b"data: {")
            and part.endswith(b"}\n\n")
            and part.find(b"\n") == len(part) - 2
            and part.find(b"\r") < 0
            and self._lines
            and not (self._rest or self._data or self._kind or self._is_json)
        ):
            self._after_cr = False
            return [(b"", part[6:-2])]  # most parts are one event
        # The end of a line may be cut between its CR and LF.
        if self._after_cr and part[:1] == b"\n":
            part = part[1:]
        if not part:
            return []
        # The first bytes show a body that is one JSON value.
        if not self._lines and not self._rest:
            part = part.removeprefix(BYTE_ORDER_MARK)
            self._is_json = part.lstrip()[:1] in {b"{", b"["}
        self._after_cr = part[-1:] == b"\r"
        if self._is_json:
            self._keep_rest(part)
            return []
        # Join the line that was cut before, and keep the one that is cut now.
        lines = part.splitlines(keepends=True)
        rest = lines.pop() if lines and lines[-1][-1:] not in {b"\n", b"\r"} else b""
        if lines and self._rest:
            lines[0] = b"".join((*self._rest, lines[0]))
            self._rest, self._rest_bytes = [], 0
        if rest:
            self._keep_rest(rest)
        events: list[ServerEvent] = []
        for line in lines:
            self._read_line(line.rstrip(b"\r\n"), events)
        return events

    def end(self) -> list[ServerEvent]:
        """Return the events that the end of the body completes."""
        events: list[ServerEvent] = []
        rest, self._rest = b"".join(self._rest), []
        if self._is_json:
            return [(b"", rest)]
        if rest:
            self._read_line(rest, events)
        self._dispatch(events)
        return events

    def _read_line(self, line: bytes, events: list[ServerEvent]) -> None:
        self._lines += 1
        if line.startswith(b"data:"):
            self._add_data(line[5:].strip(), events)
        elif not line:
            self._dispatch(events)
        elif line.startswith(b"event:"):
            self._kind = line[6:].strip()
        elif line.startswith(b"error:"):  # servers of llama.cpp until 2025
            self._dispatch(events)
            events.append((b"error", line[6:].strip()))
        elif not self.unread and not line.startswith((b":", b"id:", b"retry:")):
            self.unread = line[:200]

    def _add_data(self, data: bytes, events: list[ServerEvent]) -> None:
        if self._data and self._is_complete():
            self._dispatch(events)
        self._data.append(data)
        self._data_bytes += len(data)
        if data == DONE:
            self._dispatch(events)
        elif self._data_bytes > MAX_EVENT_BYTES or len(self._data) > MAX_DATA_LINES:
            raise _endless_event()

    def _is_complete(self) -> bool:
        """Whether the data so far needs no further line. Only the first line is looked at: a value
        of several lines is not complete in one of them."""
        if len(self._data) > 1:
            return False
        (data,) = self._data
        try:
            _COMPLETE_JSON(data)
        except DECODE_ERRORS:
            return False
        return True

    def _dispatch(self, events: list[ServerEvent]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append((self._kind, data))
            self._data, self._data_bytes = [], 0
        self._kind = b""

    def _keep_rest(self, part: bytes) -> None:
        if not self._rest:
            self._rest_began_s = self._clock.now()
        elif self._clock.now() - self._rest_began_s > EVENT_TIMEOUT_S:
            raise MalformedAnswer(f"an event of the server took more than {EVENT_TIMEOUT_S:g} s")
        self._rest.append(part)
        self._rest_bytes += len(part)
        if self._rest_bytes > MAX_EVENT_BYTES:
            raise _endless_event()


def _endless_event() -> MalformedAnswer:
    return MalformedAnswer(f"an event of the server has more than {MAX_EVENT_BYTES} bytes")
