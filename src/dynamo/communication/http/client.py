"""An HTTP/1.1 client of one server: keep-alive connections, TLS, and answers as they arrive."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from dynamo.communication.link import keep_alive
from dynamo.core.errors import ConfigError
from dynamo.core.redaction import remember_secrets
from dynamo.core.settings.server_url import server_url

CONNECT_TIMEOUT_S = 10.0
HEAD_TIMEOUT_S = 15.0
"""An answer's head must be complete so many seconds after its first byte."""
MAX_BODY_BYTES = 8 << 20
"""A longer body fails, unless it is passed on as it arrives."""
MAX_ERROR_BYTES = 64 << 10
"""The rest of the body of another status than 200 and 201 is not read."""
GOOD_STATUSES = (200, 201)
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of an answer's head, and of what comes between two parts of its body."""
MAX_HEADERS = 200
MAX_INTERIM_ANSWERS = 16
"""Most answers 1xx before the answer."""
SWITCHING_PROTOCOLS = 101
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
OnData = Callable[[bytes], bool]
"""Takes a part of a body. False: the rest is not wanted."""


class HttpAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. `body` is empty if it was passed on. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClientConnection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[HttpAnswer] | None = None
        self._on_data: OnData | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends_by_close = False
        self.reusable = True
        self.answered = False
        """Whether any byte of the present answer has come."""

    async def exchange(self, request: bytes, on_data: OnData | None) -> HttpAnswer:
        """Send a request and return its answer. Raises `OSError`, and what `on_data` raises. The
        connection is of no use after an error or a cancellation."""
        self.reusable = self.answered = False
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionError("the connection is closed")
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._on_data = on_data
        self._has_head = self._ends_by_close = False
        self._header_count = self._header_bytes = self._interim_answers = 0
        self._bytes_between = 0
        self._parser = httptools.HttpResponseParser(self)
        self._ended = self._loop.create_future()
        transport.write(request)
        try:
            return await self._ended
        finally:
            self._ended = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if not self.reusable:
                transport.abort()

    def close(self) -> None:
        """Close the connection. An exchange fails."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self.close()
            return
        self.answered = True
        self._bytes_between += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error}")
        if self._ended.done():
            return
        if self._bytes_between > MAX_HEADER_BYTES:
            self._fail(f"the answer has more than {MAX_HEADER_BYTES} bytes of headers")
        elif not self._has_head and self._timer is None:
            text = f"the headers of the answer took more than {HEAD_TIMEOUT_S:g} s"
            self._timer = self._loop.call_later(HEAD_TIMEOUT_S, self._fail, text)

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._ended is not None and self._ends_by_close and exc is None:
            self._complete()
            return
        text = f": {exc}" if exc else ""
        self._fail(f"the connection was closed during an answer{text}")

    def on_message_begin(self) -> None:
        """Count interim answers. A connection that sends another answer is not used again."""
        if self._ended is None or self._ended.done():
            self.reusable = False
            raise ConnectionError("an answer without a request")
        self._header_count = self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header. Headers behind the body are only counted. Raises `ConnectionError`
        at the limits."""
        self._header_count += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_count > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            text = f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them"
            self._fail(f"the answer has {text}")
            raise ConnectionError(text)
        if not self._has_head:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Read how the body ends."""
        status = self._parser.get_status_code()
        if status < 200 and status != SWITCHING_PROTOCOLS:
            return
        self._has_head = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        headers = self._headers
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._ends_by_close = not chunked and "content-length" not in headers

    def on_body(self, data: bytes) -> None:
        """Pass a part of a good answer's body on, or collect it."""
        self._bytes_between = 0
        ended = self._ended
        if ended is None or ended.done():
            return
        if self._on_data is None or self._parser.get_status_code() not in GOOD_STATUSES:
            self._collect(data)
            return
        try:
            wanted = self._on_data(data)
        except Exception as error:  # noqa: BLE001 - the awaited call raises it
            ended.set_exception(error)
            return
        if not wanted:
            self._complete()

    def on_message_complete(self) -> None:
        """End the exchange, unless more than an interim answer is to come."""
        ended = self._ended
        if ended is None or ended.done():
            return
        if self._has_head:
            self.reusable = self._parser.should_keep_alive()
            self._complete()
            return
        self._headers = {}
        self._interim_answers += 1
        if self._interim_answers > MAX_INTERIM_ANSWERS:
            self._fail(f"more than {MAX_INTERIM_ANSWERS} answers 1xx came before the answer")

    def _collect(self, data: bytes) -> None:
        """Collect a part of the body. Of an error, its beginning says enough."""
        self._body += data
        if self._parser.get_status_code() in GOOD_STATUSES:
            if len(self._body) > MAX_BODY_BYTES:
                self._fail(f"the answer has more than {MAX_BODY_BYTES} bytes")
        elif len(self._body) > MAX_ERROR_BYTES:
            del self._body[MAX_ERROR_BYTES:]
            self._complete()

    def _complete(self) -> None:
        if self._ended is not None and not self._ended.done():
            status = self._parser.get_status_code()
            self._ended.set_result(HttpAnswer(status, self._headers, bytes(self._body)))

    def _fail(self, text: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(text))


class HttpClient:
    """Sends requests to the server of `url`, at any path below it. Idle connections are kept."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        """`tls` is used for https. Raises `ConfigError` for what is no URL of a server, or no
        header."""
        self.url = server_url(url)
        parts = urlsplit(self.url)
        self._path = parts.path
        self._tls = tls if parts.scheme == "https" else None
        self._host, self._port = (
            parts.hostname or "",
            parts.port or (80 if self._tls is None else 443),
        )
        self._authorization = headers.get("authorization", "")
        remember_secrets((self._authorization.rpartition(" ")[2],))
        own = {"host": parts.netloc, "content-type": "application/json"} | dict(headers)
        for name, value in own.items():
            if not _HEADER_VALUE.fullmatch(value):
                raise ConfigError(
                    f"the header {name!r} has a character that HTTP does not transport",
                    hint="is the API key complete, and only the key?",
                )
        own.pop("authorization", None)
        self._content_type = own.pop("content-type")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._idle: list[HttpClientConnection] = []
        self._busy: set[HttpClientConnection] = set()
        self._closed = False

    @property
    def has_authorization(self) -> bool:
        """Whether requests have an authorization of the client's own."""
        return bool(self._authorization)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        on_data: OnData | None = None,
        *,
        authorization: str = "",
        content_type: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> HttpAnswer:
        """Send a request, with `headers` of its own. Parts of the body of an answer 200 or 201
        go to `on_data`, if given.
        `authorization` and `content_type` replace the headers of these names. Raises `OSError` if
        the server cannot be reached or breaks off. Cancellation closes the connection, by which
        servers notice it."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        head += f"content-type: {content_type or self._content_type}\r\n"
        if authorization or self._authorization:
            head += f"authorization: {authorization or self._authorization}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body
        if self._closed:
            raise ConnectionError("the client is closed")
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                return await self._exchange(connection, request, on_data)
            except ConnectionError:
                if connection.answered:
                    raise
                break  # the server closed it while it was idle, or died of this request
        return await self._exchange(await self._connect(), request, on_data)

    def close(self) -> None:
        """Close all connections. Exchanges fail with `ConnectionError`, also later ones."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    async def _exchange(
        self, connection: HttpClientConnection, request: bytes, on_data: OnData | None
    ) -> HttpAnswer:
        self._busy.add(connection)
        try:
            return await connection.exchange(request, on_data)
        finally:
            self._busy.discard(connection)
            if connection.reusable:
                self._idle.append(connection)

    async def _connect(self) -> HttpClientConnection:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                HttpClientConnection, self._host, self._port, ssl=self._tls
            )
        if self._closed:  # meanwhile
            connection.close()
            raise ConnectionError("the client is closed")
        return connection
