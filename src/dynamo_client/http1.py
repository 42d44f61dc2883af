"""HTTP/1.1 without sockets: encodes requests and parses responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4096
BODILESS_STATUSES = (204, 304)
READ_UNTIL_CLOSE = -1


class MalformedResponseError(Exception):
    """The response is not HTTP, or ended too early."""


class ResponseHead(NamedTuple):
    """Status and headers (names in lower case)."""

    status: int
    headers: Mapping[str, str]


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Encode a request. Raises `ValueError` for a line break in a header."""
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a line break in a header")
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


class ResponseParser:
    """Parses one response from bytes that may be split anywhere. `head` is None until the headers
    are whole. `complete` is True when the body has ended."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.complete = False
        self._buffer = b""
        self._chunked = False
        self._in_trailers = False
        self._remaining_bytes = 0

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        if self.head is None or not self.complete or self._remaining_bytes == READ_UNTIL_CLOSE:
            return False
        return self.head.headers.get("connection", "").lower() != "close" and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Add bytes; return those of the body among them. Raises `MalformedResponseError`."""
        while self.head is None:
            self._buffer += data
            data = b""
            head, separator, after = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise MalformedResponseError(f"the headers exceed {MAX_HEAD_BYTES} bytes")
                return b""
            self._buffer = b""
            data = after
            self._on_head(parse_head(head))
        if self._chunked:
            return self._decode_chunks(data)
        return self._read_plain(data)

    def feed_eof(self) -> None:
        """Handle the end of the connection. Raises `MalformedResponseError` if the response is
        incomplete."""
        if self.head is not None and self._remaining_bytes == READ_UNTIL_CLOSE:
            self.complete = True
        if not self.complete:
            raise MalformedResponseError("the connection ended before the reply did")

    def _on_head(self, head: ResponseHead) -> None:
        if 100 <= head.status < 200:
            return
        self.head = head
        self._chunked = head.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = head.headers.get("content-length", "")
        if head.status in BODILESS_STATUSES:
            self._chunked, self.complete = False, True
        elif not self._chunked:
            self._remaining_bytes = int(length) if length.isdecimal() else READ_UNTIL_CLOSE
            self.complete = self._remaining_bytes == 0

    def _read_plain(self, data: bytes) -> bytes:
        if self._remaining_bytes == READ_UNTIL_CLOSE:
            return data
        body, self._buffer = data[: self._remaining_bytes], data[self._remaining_bytes :]
        self._remaining_bytes -= len(body)
        self.complete = self._remaining_bytes == 0
        return body

    def _decode_chunks(self, data: bytes) -> bytes:
        data, self._buffer = self._buffer + data, b""
        parts = []
        at = 0
        while at < len(data) and not self.complete:
            if self._remaining_bytes == 0:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    break
                self._parse_chunk_line(data[at:line_end])
                at = line_end + 2
                continue
            # Remaining bytes of the chunk and of the line break that ends it.
            part = data[at : at + self._remaining_bytes]
            parts.append(part[: max(0, self._remaining_bytes - 2)])
            self._remaining_bytes -= len(part)
            at += len(part)
        self._buffer = data[at:]
        if self._remaining_bytes == 0 and len(self._buffer) > MAX_LINE_BYTES:
            raise MalformedResponseError(f"a chunk's size line exceeds {MAX_LINE_BYTES} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _parse_chunk_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.complete = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            size = -1
        if size < 0:
            raise MalformedResponseError(f"{line[:20]!r} is not a chunk size")
        if size:
            self._remaining_bytes = size + 2
        else:
            self._in_trailers = True


def parse_head(head: bytes) -> ResponseHead:
    """Parse the status line and the headers. Raises `MalformedResponseError`."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise MalformedResponseError(f"{first[:40]!r} is not HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return ResponseHead(int(status), headers)
