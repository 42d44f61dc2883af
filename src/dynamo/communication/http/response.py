"""One response, on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

ResponseHeaders = Sequence[tuple[str, str]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@lru_cache(maxsize=1)
def _date_line(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}\r\n"


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\n"


def encode_head(status: int, headers: ResponseHeaders, framing: str) -> bytes:
    """Status line and headers, `framing` (ready lines) last. Raises ValueError on a line break
    inside a header."""
    lines = ""
    for name, value in headers:
        lines += f"{name}: {value}\r\n"
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("line break in a header")
    text = _status_line(status) + lines + _date_line(int(time.time())) + framing + "\r\n"
    return text.encode("latin-1")


class ResponseConnection(Protocol):
    """What a response needs of its connection."""

    output: list[bytes]
    """Bytes as they are to be sent."""
    pending_events: list[bytes]
    """What follows them: the events of this turn, which become one chunk where the response is
    `framed`."""
    chunked: bool

    def schedule_flush(self) -> None:
        """Send `out` and `events` once before the loop goes back to sleep."""

    def merge_events(self) -> None:
        """Move `events` to `out`."""

    def unsent_bytes(self) -> int:
        """Bytes that the kernel has not taken."""


class Response:
    """Synchronous; nothing here waits. Events written in one turn of the loop leave together.

    `congested`: the client has not read for a while or half the backlog waits; merge what can be
    merged and wait for `on_relief`. `overrun`: the backlog's limit or the stall's was passed; only
    `end` is of use any more. `open`: writes are of use.
    """

    __slots__ = (
        "_head_only",
        "_version",
        "_writer",
        "backlog_limit",
        "congested",
        "ended",
        "keep_alive",
        "on_writable",
        "open",
        "overrun",
        "started",
        "status",
    )

    def __init__(
        self,
        link: ResponseConnection,
        method: str,
        version: str,
        *,
        keep_alive: bool,
        backlog_limit: int,
    ) -> None:
        self._writer = link
        self._head_only = method == "HEAD"
        self._version = version
        link.chunked = False
        self.keep_alive = keep_alive
        self.backlog_limit = backlog_limit
        self.status = 0
        self.started = self.ended = self.congested = self.overrun = False
        self.open = True
        self.on_writable: Callable[[], None] | None = None

    @property
    def backlog_bytes(self) -> int:
        """Bytes written and not yet taken by the kernel."""
        return self._writer.unsent_bytes()

    def start(self, status: int, headers: ResponseHeaders = ()) -> None:
        """Begin a stream: chunked, or until the connection closes for HTTP/1.0."""
        if self._version == "1.1":
            self._writer.chunked = not self._head_only
            framing = "transfer-encoding: chunked\r\n" + self._connection_header()
        else:
            self.keep_alive = False
            framing = "connection: close\r\n"
        self._write_head(status, encode_head(status, headers, framing))

    def write(self, data: bytes) -> bool:
        """One event of a stream. False = nobody will read it."""
        if not self.open:
            return False
        link = self._writer
        events = link.pending_events
        if not events:
            if self._head_only:
                return True
            link.schedule_flush()
        events.append(data)
        return True

    def get_event_buffer(self) -> tuple[list[bytes], Callable[[], None]]:
        """Where one that writes event after event puts them itself while this is `open`: it calls
        the second where the list is empty, and appends."""
        return self._writer.pending_events, self._writer.schedule_flush

    def end(self, tail: bytes = b"") -> None:
        """The stream is complete. Allowed after an overrun, unlike `write`."""
        if self.ended:
            return
        link = self._writer
        if tail and not self._head_only:
            link.pending_events.append(tail)
        link.merge_events()
        if link.chunked:
            link.output.append(LAST_CHUNK)
        self._finish()

    def send(self, status: int, headers: ResponseHeaders, body: bytes) -> None:
        """A whole response at once."""
        if status == 204:
            framing = self._connection_header()
        else:
            framing = f"content-length: {len(body)}\r\n{self._connection_header()}"
        self._write_head(status, encode_head(status, headers, framing))
        if body and not self._head_only:
            self._writer.output.append(body)
        self._finish()

    def _connection_header(self) -> str:
        if not self.keep_alive:
            return "connection: close\r\n"
        return "" if self._version == "1.1" else "connection: keep-alive\r\n"

    def _write_head(self, status: int, data: bytes) -> None:
        if self.started:
            raise RuntimeError("the response has been started already")
        self.started = True
        self.status = status
        self._writer.output.append(data)
        self._writer.schedule_flush()

    def _finish(self) -> None:
        self.ended = True
        self.open = False
        self.on_writable = None
        self._writer.schedule_flush()
