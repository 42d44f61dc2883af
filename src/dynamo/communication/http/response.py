"""The response to one HTTP request."""

from __future__ import annotations

import asyncio
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
    return f"HTTP/1.1 {status} {phrase}"


def encode_head(status: int, headers: ResponseHeaders, framing: str) -> bytes:
    """Encode status line, headers and `framing` lines. Raises `ValueError` for a line break."""
    lines = "\r\n".join(["", *map(": ".join, headers)])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("line break in a header")
    text = f"{_status_line(status)}{lines}\r\n{_date_line(int(time.time()))}{framing}\r\n"
    return text.encode("latin-1")


class FlushedConnection(Protocol):
    """A connection in a queue of output. `paused_at` is None while the kernel takes bytes."""

    closing: bool
    paused_at: float | None
    write: Callable[[bytes], None]

    def pop_output(self) -> bytes:
        """Remove and return the bytes to write."""

    def on_written(self) -> None:
        """Look at the state of writing, if the connection is closing or paused."""


class ConnectionFlusher:
    """Flushes every queued connection in one callback at the end of the loop iteration.

    uvloop's `transport.write` sends at once, so output is joined first. All output is prepared
    before the first byte is sent, because the kernel's send path evicts the CPU's caches: preparing
    in between would cost that once per token. A connection appends itself to `queue`, at most once
    per flush. The first one calls `schedule`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: list[FlushedConnection] = []

    def schedule(self) -> None:
        """Flush after all callbacks that are ready in this loop iteration."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        queued = self.queue[:]
        self.queue.clear()
        ready = [(connection.write, connection.pop_output()) for connection in queued]
        for write, data in ready:
            if data:
                write(data)
        for connection in queued:
            if connection.closing or connection.paused_at is not None:
                connection.on_written()


class ResponseConnection(Protocol):
    """The connection of a response.

    `output` holds bytes in their final form. `pending_events` follow them: the events of this loop
    iteration, which become one chunk if the response is `chunked`.
    """

    output: list[bytes]
    pending_events: list[bytes]
    chunked: bool

    def schedule_flush(self) -> None:
        """Send `output` and `pending_events` at the end of this loop iteration."""

    def merge_events(self) -> None:
        """Move `pending_events` to `output`."""

    def unsent_bytes(self) -> int:
        """Return how many bytes the kernel has not taken."""


class Response:
    """A response in progress. No method waits. Events of one loop iteration leave together.

    `open` is True while `write` has an effect. `congested` is True if the client has not read for a
    while or half the backlog limit is unsent: the writer should merge events until `on_writable` is
    called. `overrun` is True once the client exceeded the backlog or stall limit: only `end` still
    has an effect. A stream that may be silent has an `on_silence`, which is called with the seconds
    without output, as often as the server checks its connections. `paused_at`: the connection takes
    no bytes since then, because the client does not read; `paused_s`: the sum of earlier times.
    """

    def __init__(
        self,
        connection: ResponseConnection,
        method: str,
        version: str,
        *,
        keep_alive: bool,
        backlog_limit: int,
    ) -> None:
        self._writer = connection
        self._head_only = method == "HEAD"
        self._version = version
        connection.chunked = False
        self.keep_alive = keep_alive
        self.backlog_limit = backlog_limit
        self.status = 0
        self.started = self.ended = self.congested = self.overrun = False
        self.open = True
        self.on_writable: Callable[[], None] | None = None
        self.on_silence: Callable[[float], None] | None = None
        self.paused_at: float | None = None
        self.paused_s = 0.0
        self._silent_since = 0.0
        self._silent_bytes = -1

    def resume(self, now: float) -> None:
        """Note that the connection takes bytes again."""
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
        self.paused_at = None

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were written and not yet taken by the kernel."""
        return self._writer.unsent_bytes()

    def start(self, status: int, headers: ResponseHeaders = ()) -> None:
        """Start a streamed response. An HTTP/1.0 stream ends with its connection."""
        if self._version == "1.1":
            self._writer.chunked = not self._head_only
            framing = "transfer-encoding: chunked\r\n" + self._connection_header()
        else:
            self.keep_alive = False
            framing = "connection: close\r\n"
        self._write_head(status, encode_head(status, headers, framing))

    def write(self, data: bytes) -> bool:
        """Write one event of a stream. False: the client will not read it."""
        if not self.open:
            return False
        connection = self._writer
        events = connection.pending_events
        if not events:
            if self._head_only:
                return True
            connection.schedule_flush()
        events.append(data)
        return True

    def get_event_buffer(self) -> tuple[list[bytes], Callable[[], None]]:
        """Return the list of pending events and the function that schedules a flush.

        A fast path may append events itself while the response is `open`. If the list is empty, the
        caller must call the function first.
        """
        return self._writer.pending_events, self._writer.schedule_flush

    def check_silence(self, now: float, written_bytes: int) -> None:
        """Call `on_silence` if `written_bytes` of the connection are those of the last check."""
        if written_bytes != self._silent_bytes:
            self._silent_bytes, self._silent_since = written_bytes, now
        elif self.on_silence is not None:
            self.on_silence(now - self._silent_since)

    def end(self, tail: bytes = b"") -> None:
        """Complete the stream with an optional last event. Allowed after an overrun."""
        if self.ended:
            return
        connection = self._writer
        if tail and not self._head_only:
            connection.pending_events.append(tail)
        connection.merge_events()
        if connection.chunked:
            connection.output.append(LAST_CHUNK)
        self._finish()

    def send(self, status: int, headers: ResponseHeaders, body: bytes) -> None:
        """Send a whole response."""
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
            raise RuntimeError("the response was started already")
        self.started = True
        self.status = status
        self._writer.output.append(data)
        self._writer.schedule_flush()

    def _finish(self) -> None:
        self.ended = True
        self.open = False
        self.on_writable = self.on_silence = None
        self._writer.schedule_flush()
