"""HTTP/1.1 as bytes: requests out, replies in. No sockets here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HEAD_BYTES = 64 << 10
LINE_BYTES = 4096
BODILESS = (204, 304)
UNTIL_CLOSED = -1


class BrokenReplyError(Exception):
    """What came is not HTTP, or ended too early."""


class Head(NamedTuple):
    """Status and headers (names in lower case)."""

    status: int
    headers: Mapping[str, str]


def request_bytes(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """A whole request. Raises `ValueError` for a header that would break out of its line."""
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a line break in a header")
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


class ReplyReader:
    """Takes bytes as they come, split anywhere. `head` is None until it is whole; `complete` when
    the body has ended."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.complete = False
        self._rest = b""
        self._chunked = False
        self._trailing = False
        self._left = 0

    @property
    def reusable(self) -> bool:
        """May the connection carry another request?"""
        if self.head is None or not self.complete or self._left == UNTIL_CLOSED:
            return False
        return self.head.headers.get("connection", "").lower() != "close" and not self._rest

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` holds. Raises `BrokenReplyError`."""
        while self.head is None:
            self._rest += data
            data = b""
            head, found, after = self._rest.partition(b"\r\n\r\n")
            if not found:
                if len(self._rest) > HEAD_BYTES:
                    raise BrokenReplyError("no end of the headers")
                return b""
            self._rest = b""
            data = after
            self._begin(parse_head(head))
        if self._chunked:
            return self._dechunk(data)
        return self._plain(data)

    def end(self) -> None:
        """Nothing more comes. Raises `BrokenReplyError` if the reply is not whole."""
        if self.head is not None and self._left == UNTIL_CLOSED:
            self.complete = True
        if not self.complete:
            raise BrokenReplyError("the connection ended before the reply did")

    def _begin(self, head: Head) -> None:
        if 100 <= head.status < 200:
            return
        self.head = head
        self._chunked = head.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = head.headers.get("content-length", "")
        if head.status in BODILESS:
            self._chunked, self.complete = False, True
        elif not self._chunked:
            self._left = int(length) if length.isdecimal() else UNTIL_CLOSED
            self.complete = self._left == 0

    def _plain(self, data: bytes) -> bytes:
        if self._left == UNTIL_CLOSED:
            return data
        body, self._rest = data[: self._left], data[self._left :]
        self._left -= len(body)
        self.complete = self._left == 0
        return body

    def _dechunk(self, data: bytes) -> bytes:
        data, self._rest = self._rest + data, b""
        parts = []
        at = 0
        while at < len(data) and not self.complete:
            if self._left == 0:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    break
                self._line(data[at:line_end])
                at = line_end + 2
                continue
            # A chunk and the line break that ends it.
            part = data[at : at + self._left]
            parts.append(part[: max(0, self._left - 2)])
            self._left -= len(part)
            at += len(part)
        self._rest = data[at:]
        if self._left == 0 and len(self._rest) > LINE_BYTES:
            raise BrokenReplyError("no end of a chunk's size")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _line(self, line: bytes) -> None:
        if self._trailing:
            self.complete = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            size = -1
        if size < 0:
            raise BrokenReplyError(f"{line[:20]!r} is not a chunk's size")
        if size:
            self._left = size + 2
        else:
            self._trailing = True


def parse_head(head: bytes) -> Head:
    """Raises `BrokenReplyError`."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise BrokenReplyError(f"{first[:40]!r} is not HTTP")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Head(int(status), headers)
