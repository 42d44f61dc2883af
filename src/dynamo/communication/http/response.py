"""One response, on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynamo.communication.http.heads import LAST_CHUNK, Headers, head


class Link(Protocol):
    """What a response needs of its connection."""

    out: list[bytes]
    """Bytes as they are to be sent."""
    events: list[bytes]
    """What follows them: the events of this turn, which become one chunk where the response is
    `framed`."""
    framed: bool

    def arm(self) -> None:
        """Send `out` and `events` once before the loop goes back to sleep."""

    def join(self) -> None:
        """Move `events` to `out`."""

    def backlog(self) -> int:
        """Bytes that the kernel has not taken."""


class Response:
    """Synchronous; nothing here waits. Events written in one turn of the loop leave together.

    `congested`: the client has not read for a while or half the backlog waits; merge what can be
    merged and wait for `on_relief`. `overrun`: the backlog's limit or the stall's was passed; only
    `end` is of use any more. `open`: writes are of use.
    """

    __slots__ = (
        "_bodiless",
        "_link",
        "_version",
        "backlog_limit",
        "congested",
        "ended",
        "keep_alive",
        "on_relief",
        "open",
        "overrun",
        "started",
        "status",
    )

    def __init__(
        self, link: Link, method: str, version: str, *, keep_alive: bool, backlog_limit: int
    ) -> None:
        self._link = link
        self._bodiless = method == "HEAD"
        self._version = version
        link.framed = False
        self.keep_alive = keep_alive
        self.backlog_limit = backlog_limit
        self.status = 0
        self.started = self.ended = self.congested = self.overrun = False
        self.open = True
        self.on_relief: Callable[[], None] | None = None

    @property
    def backlog_bytes(self) -> int:
        """Bytes written and not yet taken by the kernel."""
        return self._link.backlog()

    def start(self, status: int, headers: Headers = ()) -> None:
        """Begin a stream: chunked, or until the connection closes for HTTP/1.0."""
        if self._version == "1.1":
            self._link.framed = not self._bodiless
            framing = "transfer-encoding: chunked\r\n" + self._connection()
        else:
            self.keep_alive = False
            framing = "connection: close\r\n"
        self._begin(status, head(status, headers, framing))

    def write(self, data: bytes) -> bool:
        """One event of a stream. False = nobody will read it."""
        if not self.open:
            return False
        link = self._link
        events = link.events
        if not events:
            if self._bodiless:
                return True
            link.arm()
        events.append(data)
        return True

    def outlet(self) -> tuple[list[bytes], Callable[[], None]]:
        """Where one that writes event after event puts them itself while this is `open`: it calls
        the second where the list is empty, and appends."""
        return self._link.events, self._link.arm

    def end(self, tail: bytes = b"") -> None:
        """The stream is complete. Allowed after an overrun, unlike `write`."""
        if self.ended:
            return
        link = self._link
        if tail and not self._bodiless:
            link.events.append(tail)
        link.join()
        if link.framed:
            link.out.append(LAST_CHUNK)
        self._close()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response at once."""
        if status == 204:
            framing = self._connection()
        else:
            framing = f"content-length: {len(body)}\r\n{self._connection()}"
        self._begin(status, head(status, headers, framing))
        if body and not self._bodiless:
            self._link.out.append(body)
        self._close()

    def _connection(self) -> str:
        if not self.keep_alive:
            return "connection: close\r\n"
        return "" if self._version == "1.1" else "connection: keep-alive\r\n"

    def _begin(self, status: int, data: bytes) -> None:
        if self.started:
            raise RuntimeError("the response has been started already")
        self.started = True
        self.status = status
        self._link.out.append(data)
        self._link.arm()

    def _close(self) -> None:
        self.ended = True
        self.open = False
        self.on_relief = None
        self._link.arm()
