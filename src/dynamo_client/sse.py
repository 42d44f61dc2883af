"""Server-sent events out of bytes that are split anywhere."""

from __future__ import annotations

from collections.abc import Iterator

DATA_PREFIX = b"data:"


class SseParser:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of every event that is complete now."""
        data = self._buffer + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # its line feed may still come
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._buffer = rest + held
        return (found for event in events if (found := parse_event_data(event)))

    def feed_eof(self) -> bytes:
        """The data of an event that was cut off by the end."""
        rest, self._buffer = self._buffer, b""
        return parse_event_data(rest.replace(b"\r", b"\n"))


def parse_event_data(event: bytes) -> bytes:
    """Its data lines, joined; b"" for a comment."""
    if b"\n" not in event:
        return event[len(DATA_PREFIX) :].strip() if event.startswith(DATA_PREFIX) else b""
    lines = (
        line[len(DATA_PREFIX) :].strip()
        for line in event.split(b"\n")
        if line.startswith(DATA_PREFIX)
    )
    return b"\n".join(lines)
