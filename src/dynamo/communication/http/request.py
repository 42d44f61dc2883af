"""Parses HTTP requests."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal
from urllib.parse import unquote

import httptools

from dynamo.communication.http.body_budget import LARGE_BODY_BYTES, BodyBudget, BodyHold
from dynamo.communication.http.errors import HeadersTooLarge
from dynamo.communication.http.limits import HttpLimits
from dynamo.core.errors import DynamoError, InvalidRequest, TooLarge

Stage = Literal["idle", "headers", "body"]


PAUSE_S = 0.001
"""The loop accepts a connection, reads and answers it in turns of their own: `sleep(0)` is one."""


class Request:
    """A request. Header names are lower-case bytes. `path` is percent-decoded.

    `body` and `keep_alive` are set when the body is complete. `hold` is the body's share of the
    budget, if it has one. `decoded_body` is a body that was decoded, until its request is sent on.
    """

    __slots__ = (
        "body",
        "decoded_body",
        "headers",
        "hold",
        "keep_alive",
        "method",
        "path",
        "query",
        "version",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Mapping[bytes, bytes],
        version: str = "1.1",
    ) -> None:
        self.method = method
        text = target.decode("latin-1")
        if text.startswith("/") and _find_special(text) is None:
            self.path, self.query = text, ""
        else:
            self.path, self.query = split_target(text)
        self.headers = headers
        self.body: bytes | bytearray = b""
        self.decoded_body: bytes | bytearray = b""
        self.hold: BodyHold | None = None
        self.version = version
        self.keep_alive = False

    @property
    def is_large(self) -> bool:
        """Whether the body is large, also after it was decoded."""
        return self.hold is not None and self.hold.size > LARGE_BODY_BYTES

    async def pause(self) -> None:
        """Serve others between two steps of the work on a large body."""
        await asyncio.sleep(PAUSE_S)

    def release_body(self) -> None:
        """Drop the body, which counts in the budget no more."""
        self.body = b""
        if self.hold is not None:
            self.hold.release()

    def header(self, name: bytes) -> str | None:
        """Return a header by its lower-case name. Repeated headers are joined by commas."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


_find_special = re.compile("[?#%]").search


def split_target(text: str) -> tuple[str, str]:
    """Return path and query of a request target in origin or absolute form."""
    if not text.startswith("/") and "://" in text:
        text = "/" + text.split("://", 1)[1].partition("/")[2]
    path, _, query = text.partition("#")[0].partition("?")
    return (unquote(path) if "%" in path else path), query


HeaderCheck = Callable[[Request], None]
"""Raises a `DynamoError` for a request without its body, which is then not received."""


class RequestReader:
    """Parses the requests of one connection. `feed` passes complete ones to `on_request`.

    httptools has no limits. This class therefore counts the bytes of headers and bodies.
    """

    def __init__(
        self,
        limits: HttpLimits,
        on_request: Callable[[Request], None],
        on_continue: Callable[[], None],
        check_headers: HeaderCheck | None = None,
        budget: BodyBudget | None = None,
    ) -> None:
        self._limits = limits
        self._budget = budget or BodyBudget(limits)
        self._on_request = on_request
        self._on_continue = on_continue
        self._check_headers = check_headers
        self._parser = httptools.HttpRequestParser(self)
        self._error: DynamoError | None = None
        # The current message has at most and at least this many bytes.
        self._max_received_bytes = self._min_received_bytes = 0
        self._body: bytes | bytearray = b""
        self._request: Request | None = None
        self.messages_started = self.body_bytes = 0
        self.stage: Stage = "idle"
        self.on_message_begin()
        self.stage, self.messages_started = "idle", 0

    def feed(self, data: bytes) -> bool:
        """Parse received bytes. False: the client requests a tunnel and no request follows.

        Raises the `DynamoError` to answer with. No more bytes may be fed after an error.
        """
        started, idle = self.messages_started, self.stage == "idle"
        body_bytes = 0 if idle else self.body_bytes
        self._max_received_bytes += len(data)
        self._min_received_bytes += len(data)
        try:
            if not self._parse(data):
                return False
        except httptools.HttpParserError as error:
            raise self._error or InvalidRequest(f"malformed HTTP: {error}") from None
        if self.stage == "idle":
            self._max_received_bytes = self._min_received_bytes = 0
        elif self.messages_started > started + idle:  # the message began somewhere within `data`
            self._max_received_bytes, self._min_received_bytes = len(data), 0
        elif self.stage == "headers" and self._min_received_bytes > self._limits.max_header_bytes:
            raise self._headers_too_large()
        elif self.body_bytes > body_bytes:
            self._trailer_bytes = 0
        elif self.stage == "body":  # perhaps within a trailer, which httptools buffers
            self._trailer_bytes += len(data)
            if self._trailer_bytes > self._limits.max_header_bytes:
                raise self._headers_too_large()
        if self.stage == "body" and self._request is not None and self.body_bytes:
            self._hold_body(self._request)
        return True

    def _parse(self, data: bytes) -> bool:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._ignores_upgrade():
                    return False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            else:
                return True

    def _ignores_upgrade(self) -> bool:
        """Return True for an offered upgrade, which the server ignores as HTTP allows.

        The parser would take all following bytes, the body too, for another protocol.
        """
        return bool(self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT")

    def _head_without_upgrade(self) -> bytes:
        """Return the received head without the headers that offer an upgrade."""
        headers = [
            pair for name, value in self._raw_headers for pair in _without_upgrade(name, value)
        ]
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._target, version)]
        lines += [b"%b: %b" % pair for pair in headers]
        return b"\r\n".join([*lines, b"", b""])

    def close(self) -> None:
        """Release the references that form a cycle with this reader. No bytes may follow."""
        del self._parser, self._on_request, self._on_continue
        self.drop_body()

    def drop_body(self) -> None:
        """Drop an incomplete body. No bytes may follow."""
        self._body = b""
        if self.stage == "body" and self._request is not None:
            self._request.release_body()

    def on_message_begin(self) -> None:
        self.stage = "headers"
        self.messages_started += 1
        self._target = b""
        self._raw_headers: list[tuple[bytes, bytes]] = []
        self._body = b""
        self._request = None
        self.body_bytes = self._trailer_bytes = 0

    def on_url(self, data: bytes) -> None:
        self._target += data

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.stage == "headers":  # later headers are trailers, which are only counted
            if len(self._raw_headers) >= self._limits.max_headers:  # short ones take much memory
                self._error = self._headers_too_large()
                raise self._error
            self._raw_headers.append((name, value))
        else:
            self._trailer_bytes += len(name) + len(value)
            if self._trailer_bytes > self._limits.max_header_bytes:
                self._error = self._headers_too_large()
                raise self._error

    def on_headers_complete(self) -> None:
        if self._ignores_upgrade():
            return  # the headers are parsed again without the upgrade
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("latin-1")
        try:
            headers = self._validate_headers(version)
            self._request = request = Request(method, self._target, headers, version)
            if self._check_headers is not None:
                self._check_headers(request)
        except DynamoError as error:
            self._error = error
            raise
        self.stage = "body"
        if b"expect" in headers and version == "1.1":
            self._on_continue()

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self.body_bytes > self._budget.max_body_bytes:
            self._error = _body_too_large(self._budget.max_body_bytes)
            raise self._error
        if not self._body:
            self._body = data
        else:
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        body, request = self._body, self._request
        if request is None:  # an upgrade is ignored: the headers are parsed again
            return
        if len(body) > LARGE_BODY_BYTES:
            try:
                self._hold_body(request)
            except DynamoError as error:
                self._error = error
                raise
        request.body, self._body = body, b""
        request.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self.stage = "idle"
        self._on_request(request)

    def failed_request(self) -> Request:
        """Return the present request without its body, for the answer to an error.

        If its head is malformed or incomplete, the method is "-", and the headers are those that
        were read.
        """
        if self._request is not None:
            return self._request
        headers = {name.lower(): value for name, value in self._raw_headers}
        return Request("-", self._target, headers)

    def _hold_body(self, request: Request) -> None:
        """Count the part of a body that has arrived. Raises `Overloaded`."""
        if request.hold is None:
            request.hold = BodyHold(self._budget)
        request.hold.resize(self.body_bytes)
        self._budget.check(self.body_bytes)

    def _validate_headers(self, version: str) -> dict[bytes, bytes]:
        pairs = self._raw_headers
        if self._max_received_bytes > self._limits.max_header_bytes:
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in pairs)
            if size > self._limits.max_header_bytes:
                raise self._headers_too_large()
        headers = {name.lower(): value for name, value in pairs}
        if len(headers) < len(pairs):
            headers = _join_repeated(pairs)
        check_framing(headers, version, self._budget.max_body_bytes)
        return headers

    def _headers_too_large(self) -> DynamoError:
        limits = self._limits
        return HeadersTooLarge(
            f"the headers exceed {limits.max_header_bytes} bytes or {limits.max_headers} lines"
        )


def check_framing(headers: Mapping[bytes, bytes], version: str, max_body_bytes: int) -> None:
    """Raise `InvalidRequest` for ambiguous framing (smuggling), `TooLarge` for large bodies."""
    if version not in ("1.1", "1.0"):
        raise InvalidRequest(f"HTTP/{version} is not supported", hint="use HTTP/1.1")
    if version == "1.1" and b"host" not in headers:
        raise InvalidRequest("an HTTP/1.1 request must have a Host header")
    coding = headers.get(b"transfer-encoding")
    length = headers.get(b"content-length")
    if coding is not None:
        if version == "1.0" or coding.strip().lower() != b"chunked":
            raise InvalidRequest(
                "the only supported transfer encoding is `chunked`, in HTTP/1.1 requests"
            )
        if length is not None:
            raise InvalidRequest("the request has both Content-Length and Transfer-Encoding")
    if length is not None and int(length) > max_body_bytes:
        raise _body_too_large(max_body_bytes)
    expect = headers.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise InvalidRequest("the only supported expectation is `Expect: 100-continue`")


def _without_upgrade(name: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    """Return a header without its part in offering an upgrade, as zero or one pairs."""
    if name.lower() == b"upgrade":
        return []
    if name.lower() != b"connection":
        return [(name, value)]
    options = [word for word in value.split(b",") if word.strip().lower() != b"upgrade"]
    return [(name, b",".join(options))]


def _join_repeated(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for raw_name, value in pairs:
        name = raw_name.lower()
        if name in headers:
            _reject_duplicate(name)
            headers[name] += b", " + value
        else:
            headers[name] = value
    return headers


def _reject_duplicate(name: bytes) -> None:
    if name in (b"host", b"content-length", b"transfer-encoding", b"authorization"):
        raise InvalidRequest(f"the header {name.decode('latin-1')} is repeated")


def _body_too_large(limit: int) -> DynamoError:
    return TooLarge(
        f"the body exceeds the limit of {limit} bytes", hint="server.max_body_bytes sets the limit"
    )


class RequestQueue(deque[Request]):
    """Requests that wait for earlier ones of their connection. Their bodies count in the budget."""

    def __init__(self, limits: HttpLimits, budget: BodyBudget) -> None:
        super().__init__()
        self._limits = limits
        self._budget = budget

    def append(self, request: Request) -> None:
        """Add a request at the end."""
        if request.body:
            request.hold = request.hold or BodyHold(self._budget)
            request.hold.resize(len(request.body))
        super().append(request)

    def is_full(self) -> bool:
        """Return whether no further request should be read."""
        return len(self) >= self._limits.max_pipelined

    def clear(self) -> None:
        """Drop all requests with their bodies."""
        for request in self:
            request.release_body()
        super().clear()
